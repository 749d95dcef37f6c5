# SPDX-License-Identifier: Apache-2.0
"""A guest that is held: what delays a hold, and that no output is lost or repeated."""

from __future__ import annotations

import errno
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest
from guest_processes import CONTROL_OPERATIONS, WAIT_S
from guest_rig import hold

from pace import limit, until
from vhpc_slurm.node.guest.channel import ChannelRefusedError, GuestChannel
from vhpc_slurm.node.guest.hold import release, resume

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]
pytestmark = CONTROL_OPERATIONS

# numbered lines, as fast as they are read, until the file "enough" exists
LINES = """
trap 'echo got-usr1' USR1
i=0
while [ ! -e {folder}/enough ]; do i=$((i+1)); echo "line $i of the output"; done
echo "$i" > {folder}/count
exit 7
"""


def batch(guest: Guest, text: str, stdout: IO[bytes] | int, **env: str) -> subprocess.Popen[bytes]:
    """A batch script in the guest, as the plugin starts it."""
    script = guest.folder / "slurm_script"
    script.write_text("#!/bin/sh\n" + text.format(folder=guest.folder))
    script.chmod(0o700)
    more = guest.env(VHPC_RUN_SCRIPT="1", VHPC_RUN_ARGV0=str(script), **env)
    return subprocess.Popen(
        [guest.bin / "vhpc-run"], env=more, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE
    )


@pytest.fixture
def control(guest: Guest) -> Iterator[GuestChannel]:
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        yield channel


def refused(channel: GuestChannel, wait_s: float = 0.2) -> ChannelRefusedError:
    with pytest.raises(ChannelRefusedError) as caught:
        hold(channel, wait_s)
    return caught.value


def output_of(count: int) -> bytes:
    return b"".join(b"line %d of the output\n" % i for i in range(1, count + 1))


def wait_for_output(out: Path, beyond: int = 0) -> None:
    until(lambda: out.stat().st_size > beyond, "output of the batch script")


# --- what delays a hold --------------------------------------------------------------------


def test_a_task_of_a_step_delays_a_hold(guest: Guest, control: GuestChannel) -> None:
    task = guest.popen("sh", "-c", "echo up; sleep 1000", SLURM_STEP_ID="5")
    assert task.stdout is not None
    assert task.stdout.readline() == b"up\n"
    why = refused(control)
    assert (why.errno, why.why) == (errno.EBUSY, "step 5 runs")
    task.terminate()
    task.communicate(timeout=WAIT_S)
    hold(control, WAIT_S)
    release(control)


def test_a_program_without_a_step_is_named(guest: Guest, control: GuestChannel) -> None:
    task = guest.popen("sh", "-c", "echo up; sleep 1000")
    assert task.stdout is not None
    assert task.stdout.readline() == b"up\n"
    assert refused(control).why == "the program sh runs"
    task.terminate()
    task.communicate(timeout=WAIT_S)


def test_a_command_on_the_host_delays_a_hold(guest: Guest, control: GuestChannel, tmp_path: Path) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "squeue").write_text("#!/bin/sh\necho up; sleep 1000\n")
    (commands / "squeue").chmod(0o755)
    text = f"{guest.bin}/vhpc-agent --call squeue"
    run = batch(guest, text, subprocess.PIPE, VHPC_RUN_COMMANDS="squeue", VHPC_RUN_COMMAND_PATH=str(commands))
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    why = refused(control)
    assert why.errno == errno.EBUSY
    assert why.why == "the command vhpc-agent runs"  # a link named squeue has that name
    run.terminate()
    run.communicate(timeout=WAIT_S)


def test_an_input_that_has_not_ended_delays_a_hold(guest: Guest, control: GuestChannel) -> None:
    script = guest.folder / "slurm_script"
    script.write_text("#!/bin/sh\necho up; sleep 1000\n")
    script.chmod(0o700)
    run = guest.popen(VHPC_RUN_SCRIPT="1", VHPC_RUN_ARGV0=str(script))
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    assert refused(control).why == "the batch script reads an input that has not ended"
    run.terminate()
    run.communicate(timeout=WAIT_S)


def test_output_that_the_host_does_not_take_delays_a_hold(guest: Guest, control: GuestChannel) -> None:
    run = batch(guest, LINES, subprocess.PIPE)
    time.sleep(1)
    why = refused(control)
    assert (why.errno, why.why) == (errno.EBUSY, "the batch script's output is not written to its file yet")
    (guest.folder / "enough").touch()
    output, _ = run.communicate(timeout=WAIT_S)
    assert run.returncode == 7
    assert output == output_of(int((guest.folder / "count").read_text()))


# --- hold and release ----------------------------------------------------------------------


def test_nothing_is_lost_by_a_hold_and_its_release(guest: Guest, control: GuestChannel) -> None:
    out = guest.folder / "out"
    with out.open("wb") as stdout:
        run = batch(guest, LINES, stdout)
    wait_for_output(out)
    for _ in range(3):
        hold(control, WAIT_S)
        size = out.stat().st_size
        time.sleep(0.3)
        assert out.stat().st_size == size
        hold(control, WAIT_S)  # once more changes nothing
        release(control)
        wait_for_output(out, size)
    release(control)
    (guest.folder / "enough").touch()
    assert run.wait(WAIT_S) == 7
    assert out.read_bytes() == output_of(int((guest.folder / "count").read_text()))


def test_programs_start_when_the_hold_ends(guest: Guest, control: GuestChannel) -> None:
    hold(control, WAIT_S)
    started = [guest.popen("echo", str(i)) for i in range(3)]
    time.sleep(0.5)
    assert [one.poll() for one in started] == [None] * 3
    release(control)
    assert [one.communicate(timeout=WAIT_S)[0] for one in started] == [b"0\n", b"1\n", b"2\n"]


def test_a_client_that_gives_up_ends_its_hold(guest: Guest, control: GuestChannel) -> None:
    out = guest.folder / "out"
    with out.open("wb") as stdout:
        run = batch(guest, "while :; do date; sleep 0.05; done", stdout)
    task = guest.popen("sh", "-c", "echo up; sleep 1000")
    assert task.stdout is not None
    assert task.stdout.readline() == b"up\n"
    with GuestChannel.connect(guest.socket, WAIT_S) as other, pytest.raises(ChannelRefusedError):
        hold(other, 0.1)
    wait_for_output(out, out.stat().st_size)
    for one in (task, run):
        one.terminate()
        one.communicate(timeout=WAIT_S)


def test_resume_needs_a_hold(control: GuestChannel) -> None:
    with pytest.raises(ChannelRefusedError) as caught:
        resume(control, time.time_ns())
    assert (caught.value.errno, caught.value.why) == (errno.EINVAL, "the guest is not held")


def test_the_end_of_a_held_script_is_told(guest: Guest, control: GuestChannel) -> None:
    run = batch(guest, "echo up; sleep 1000", subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    hold(control, WAIT_S)
    run.kill()
    run.wait(limit(WAIT_S))
    until(lambda: control.info().sessions == 0, "the end of the held script")
    release(control)
