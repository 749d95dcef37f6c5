# SPDX-License-Identifier: Apache-2.0
"""A batch script of a held guest continues with another shim and another vhpc-run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest_processes import CONTROL_OPERATIONS, WAIT_S
from guest_rig import Saved, hold

from pace import until
from vhpc_slurm.node.guest.hold import release

pytest_plugins = ["guest_rig"]
pytestmark = CONTROL_OPERATIONS

REFUSED = 126
FAST = "i=0; while [ ! -e enough ]; do i=$((i+1)); echo line $i; echo other $i >&2; done; echo $i > count"


@pytest.fixture
def saved(programs: Path, tmp_path: Path) -> Iterator[Saved]:
    it = Saved(programs, tmp_path)
    yield it
    it.close()


def grown(path: Path, beyond: int = 0) -> None:
    until(lambda: path.stat().st_size > beyond, f"more bytes in {path.name}")


def test_output_and_status_go_on_exactly_in_the_next_client(saved: Saved) -> None:
    saved.script(FAST + "; exit 7")
    out, err = saved.folder / "out", saved.folder / "err"
    for turn in range(3):
        more = {"VHPC_RUN_ATTACH": "batch"} if turn > 0 else {}
        size = out.stat().st_size if turn > 0 else 0
        with out.open("ab") as stdout, err.open("ab") as stderr:
            run = saved.run(stdout, stderr, **more)
        grown(out, size)
        if turn < 2:
            saved.save_and_restore()
            run.wait(WAIT_S)
            err.write_bytes(b"".join(x for x in err.read_bytes().splitlines(True) if b"other" in x))
    (saved.folder / "enough").touch()
    assert run.wait(WAIT_S) == 7
    count = int((saved.folder / "count").read_text())
    assert out.read_bytes() == b"".join(b"line %d\n" % i for i in range(1, count + 1))
    assert err.read_bytes() == b"".join(b"other %d\n" % i for i in range(1, count + 1))


def test_the_script_stays_stopped_until_it_is_attached(saved: Saved) -> None:
    saved.script("while :; do date > beat; sleep 0.02; done")
    run = saved.run(subprocess.DEVNULL, subprocess.DEVNULL)
    beat = saved.folder / "beat"
    until(beat.exists, "the script's first sign of life")
    saved.save_and_restore()
    run.wait(WAIT_S)
    beat.unlink(missing_ok=True)
    time.sleep(0.5)
    assert not beat.exists()
    with saved.control() as channel:
        assert channel.info().sessions == 1
    again = saved.run(subprocess.DEVNULL, subprocess.DEVNULL, VHPC_RUN_ATTACH="batch")
    until(beat.exists, "the next sign of life")
    again.terminate()  # a signal reaches the program by its new session
    assert again.wait(WAIT_S) == -signal.SIGTERM


def test_streams_that_have_ended_stay_so(saved: Saved) -> None:
    saved.script("echo up; exec >&-; while [ ! -e enough ]; do sleep 0.02; done; echo last >&2")
    out, err = saved.folder / "out", saved.folder / "err"
    with out.open("wb") as stdout:
        run = saved.run(stdout, subprocess.PIPE)
    grown(out)
    saved.save_and_restore()
    run.wait(WAIT_S)
    with err.open("wb") as stderr:
        again = saved.run(subprocess.PIPE, stderr, VHPC_RUN_ATTACH="batch")
    assert again.stdout is not None
    assert again.stdout.read() == b""
    (saved.folder / "enough").touch()
    assert again.wait(WAIT_S) == 0
    assert (out.read_bytes(), err.read_bytes()) == (b"up\n", b"last\n")


def test_a_script_that_was_killed_ends_when_it_is_attached(saved: Saved) -> None:
    saved.script("echo $$ > pid; sleep 1000")
    run = saved.run(subprocess.DEVNULL, subprocess.DEVNULL)
    pid = saved.folder / "pid"
    until(lambda: pid.exists() and pid.read_text().strip(), "the script's number")
    saved.save_and_restore()
    run.wait(WAIT_S)
    os.kill(int(pid.read_text()), signal.SIGKILL)
    time.sleep(0.3)
    again = saved.run(subprocess.DEVNULL, subprocess.DEVNULL, VHPC_RUN_ATTACH="batch")
    assert again.wait(WAIT_S) == -signal.SIGKILL


def test_commands_run_on_the_host_again(saved: Saved) -> None:
    commands = saved.folder / "commands"
    commands.mkdir()
    (commands / "srun").write_text("#!/bin/sh\necho from the host $1\n")
    (commands / "srun").chmod(0o755)
    call = f"{saved.bin}/vhpc-agent --call srun"
    saved.script(f"{call} one; touch first; while [ ! -e enough ]; do sleep 0.02; done; {call} two")
    host = {"VHPC_RUN_COMMANDS": "srun", "VHPC_RUN_COMMAND_PATH": str(commands)}
    run = saved.run(subprocess.PIPE, subprocess.PIPE, **host)
    until((saved.folder / "first").exists, "the first call")
    saved.save_and_restore()
    run.wait(WAIT_S)
    again = saved.run(subprocess.PIPE, subprocess.PIPE, VHPC_RUN_ATTACH="batch", **host)
    (saved.folder / "enough").touch()
    assert again.communicate(timeout=WAIT_S) == (b"from the host two\n", b"")


def test_there_must_be_a_script_with_the_same_streams(saved: Saved) -> None:
    saved.script("sleep 1000")
    alone = saved.run(subprocess.DEVNULL, subprocess.PIPE, VHPC_RUN_ATTACH="batch")
    assert b"no program that waits" in alone.communicate(timeout=WAIT_S)[1]
    assert alone.returncode == REFUSED
    run = saved.run(subprocess.DEVNULL, subprocess.DEVNULL)
    with saved.control() as channel:
        until(lambda: channel.info().sessions == 1, "the script's start")
    saved.save_and_restore()
    run.wait(WAIT_S)
    closed = subprocess.run(
        f"exec {saved.bin}/vhpc-run --attach batch -- x 1>&-",
        shell=True,
        env={**os.environ, "VHPC_RUN_SOCKET": str(saved.socket)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=WAIT_S,
        check=False,
    )
    assert (closed.returncode, b"other streams" in closed.stderr) == (REFUSED, True)


def test_programs_that_had_not_started_are_dropped(saved: Saved) -> None:
    saved.script("sleep 1000")
    run = saved.run(subprocess.DEVNULL, subprocess.DEVNULL)
    with saved.control() as channel:
        until(lambda: channel.info().sessions == 1, "the script's start")
        hold(channel, WAIT_S)
    late = saved.run(subprocess.DEVNULL, subprocess.DEVNULL)
    time.sleep(0.3)
    saved.shims[-1].kill()
    for one in (saved.shims[-1], run, late):
        one.wait(WAIT_S)
    saved.new_shim()
    with saved.control() as channel:
        release(channel)
        assert channel.info().sessions == 1


def test_clients_of_a_held_shim_wait_when_the_guest_goes(saved: Saved) -> None:
    saved.script("echo up; sleep 1000")
    run = saved.run(subprocess.PIPE, subprocess.DEVNULL)
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    with saved.control() as channel:
        hold(channel, WAIT_S)
    shim = saved.shims[-1]
    shim.send_signal(signal.SIGUSR1)
    saved.agent.kill()
    late = saved.run(subprocess.DEVNULL, subprocess.DEVNULL)
    time.sleep(0.5)
    assert (run.poll(), late.poll(), shim.poll()) == (None, None, None)
    shim.send_signal(signal.SIGUSR2)
    assert (run.wait(WAIT_S), late.wait(WAIT_S), shim.wait(WAIT_S)) == (125, 125, 0)


@pytest.mark.parametrize("first", ["guest", "signal"])
def test_clients_of_a_saved_guest_end_silently_by_sigterm(saved: Saved, first: str) -> None:
    saved.script("echo up; sleep 1000")
    run = saved.run(subprocess.PIPE, subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    with saved.control() as channel:
        hold(channel, WAIT_S)
    saved.shims[-1].send_signal(signal.SIGUSR1)
    if first == "guest":
        saved.agent.kill()
        saved.agent.wait(WAIT_S)
        time.sleep(0.3)
    run.send_signal(signal.SIGTERM)
    if first == "signal":
        time.sleep(0.3)
        assert run.poll() is None
        saved.agent.kill()
    assert run.communicate(timeout=WAIT_S) == (b"", b"")
    assert run.returncode == 128 + signal.SIGTERM


def test_a_shim_that_is_held_no_more_ends_with_its_guest(saved: Saved) -> None:
    shim = saved.shims[-1]
    with saved.control() as channel:
        hold(channel, WAIT_S)
        shim.send_signal(signal.SIGUSR1)
        assert channel.info().sessions == 0
        shim.send_signal(signal.SIGUSR2)
        release(channel)
    saved.agent.kill()
    assert shim.wait(WAIT_S) == 0
