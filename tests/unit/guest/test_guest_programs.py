# SPDX-License-Identifier: Apache-2.0
"""Programs in a guest: stdio, signals, terminals, limits, host calls, through the real programs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from guest_processes import WAIT_S, gone

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]


# --- programs -----------------------------------------------------------------


def test_exit_code_stdout_and_stderr_come_back_apart(guest: Guest) -> None:
    done = guest.run("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


def test_death_by_signal_is_our_death_by_the_same_signal(guest: Guest) -> None:
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM):
        assert guest.run("sh", "-c", f"kill -{number.value} $$").returncode == -number


def test_environment_arrives_without_our_own_variables(guest: Guest) -> None:
    lines = guest.run("env", VHPC_RUN_SCRIPT="0", X="multi\nline").stdout
    assert b"X=multi\nline\n" in lines
    assert b"VHPC_RUN_" not in lines
    assert b"\nVHPC_SESSION=" in lines


def test_working_directory_umask_and_limits_arrive(guest: Guest, tmp_path: Path) -> None:
    script = f"cd {tmp_path}; umask 0037; ulimit -S -n 333; "
    script += f"exec {guest.bin}/vhpc-run sh -c 'pwd; umask; ulimit -S -n'"
    done = subprocess.run(
        ["sh", "-c", script], env=guest.env(), capture_output=True, check=True, timeout=WAIT_S
    )
    assert done.stdout.decode().split() == [str(tmp_path), "0037", "333"]


def _can_raise_limits() -> bool:
    command = ["prlimit", "--memlock=unlimited:unlimited", "true"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(
    not _can_raise_limits(),
    reason="the agent cannot raise limits here: run as root with CAP_SYS_RESOURCE",
)
def test_locked_memory_is_not_limited_in_a_guest(guest: Guest) -> None:
    """Whatever limit the relay has, which is that of slurmd or of the submitting shell."""
    script = f"ulimit -l 64; exec {guest.bin}/vhpc-run sh -c 'ulimit -S -l; ulimit -H -l'"
    done = subprocess.run(
        ["sh", "-c", script], env=guest.env(), capture_output=True, check=True, timeout=WAIT_S
    )
    assert done.stdout.split() == [b"unlimited"] * 2


@pytest.mark.promise("place.binding")
@pytest.mark.skipif(os.sched_getaffinity(0) < {0, 1}, reason="needs the CPUs 0 and 1 of this machine")
@pytest.mark.parametrize(
    ("own", "pins", "expected"),
    [("0", "1:0", {1}), ("1", "1:0:9", {0}), ("0", "0:1", {0}), ("0", "5:6", None), ("0", "", None)],
)
def test_a_task_is_bound_to_the_cpus_that_its_relay_is_on(
    guest: Guest, own: str, pins: str, expected: set[int] | None
) -> None:
    script = "import os; print(sorted(os.sched_getaffinity(0)))"
    command: list[str | Path] = ["taskset", "-c", own, guest.bin / "vhpc-run", "--", "python3", "-c", script]
    done = subprocess.run(
        command, env=guest.env(VHPC_RUN_CPUS=pins), capture_output=True, check=True, timeout=WAIT_S
    )
    assert json.loads(done.stdout) == sorted(
        expected or os.sched_getaffinity(guest.agent.pid if guest.agent else 0)
    )


def test_a_program_knows_itself_by_its_full_name(guest: Guest, tmp_path: Path) -> None:
    named = tmp_path / "named"
    named.write_text("#!/bin/sh\necho $0\n")
    named.chmod(0o700)
    for argv0, shown in (("./named", f"{tmp_path}/./named"), ("named", f"{tmp_path}/named")):
        done = subprocess.run(
            [guest.bin / "vhpc-run", argv0],
            env=guest.env(PATH=f"/nowhere::{tmp_path}:/bin"),
            cwd=tmp_path,
            capture_output=True,
            check=True,
            timeout=WAIT_S,
        )
        assert done.stdout.decode() == shown + "\n"


def test_null_devices_are_null_devices_in_the_guest(guest: Guest) -> None:
    script = "import os,sys; sys.exit(sum(1 << fd for fd in range(3) if os.fstat(fd).st_rdev))"
    command: list[str | Path] = [guest.bin / "vhpc-run", "python3", "-c", script]
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    for given, mask in (((null, null, null), 7), ((null, pipe, null), 5), ((pipe, pipe, pipe), 0)):
        stdin, stdout, stderr = given
        with subprocess.Popen(command, env=guest.env(), stdin=stdin, stdout=stdout, stderr=stderr) as process:
            process.communicate(timeout=WAIT_S)
            assert process.returncode == mask


def test_output_to_one_file_keeps_its_order(guest: Guest, tmp_path: Path) -> None:
    lines = "for i in $(seq 500); do echo out $i; echo err $i >&2; done"
    want = "".join(f"out {i}\nerr {i}\n" for i in range(1, 501)).encode()
    command: list[str | Path] = [guest.bin / "vhpc-run", "sh", "-c", lines]
    both = subprocess.STDOUT
    done = subprocess.run(
        command, env=guest.env(), stdout=subprocess.PIPE, stderr=both, check=True, timeout=WAIT_S
    )
    assert done.stdout == want
    for mode in ("wb", "ab"):
        with (tmp_path / mode).open(mode) as file:
            subprocess.run(command, env=guest.env(), stdout=file, stderr=both, check=True, timeout=WAIT_S)
        assert (tmp_path / mode).read_bytes() == want


def test_a_batch_script_is_carried_in_and_keeps_its_path(guest: Guest, tmp_path: Path) -> None:
    script = tmp_path / "slurm_script"
    script.write_text("#!/bin/sh\necho $0 $1\n")
    script.chmod(0o700)
    done = subprocess.run(
        [guest.bin / "vhpc-run", "arg"],
        env=guest.env(VHPC_RUN_SCRIPT="1", VHPC_RUN_ARGV0=str(script)),
        capture_output=True,
        check=True,
        timeout=WAIT_S,
    )
    assert done.stdout.decode() == f"{script} arg\n"


def saved(guest: Guest, tmp_path: Path, script: str, command: str) -> subprocess.CompletedProcess[bytes]:
    """A batch script with --vhpc-save; ``command`` is a shell script in the place of vhpc."""
    program, vhpc = tmp_path / "slurm_script", tmp_path / "vhpc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    vhpc.write_text(f"#!/bin/sh\n{command}\n")
    for path in (program, vhpc):
        path.chmod(0o755)
    names = {"VHPC_RUN_SAVE": "own/tools:latest", "VHPC_RUN_SAVE_COMMAND": str(vhpc), "SLURM_JOB_ID": "42"}
    return subprocess.run(
        [guest.bin / "vhpc-run"],
        env=guest.env(VHPC_RUN_SCRIPT="1", VHPC_RUN_ARGV0=str(program), **names),
        capture_output=True,
        check=False,
        timeout=WAIT_S,
    )


@pytest.mark.promise("tools.save-option")
def test_a_guest_is_saved_after_its_script(guest: Guest, tmp_path: Path) -> None:
    done = saved(guest, tmp_path, "echo out", 'echo "$@"; echo "${VHPC_RUN_SAVE-unset}"; cat')
    assert (done.returncode, done.stdout) == (0, b"out\n")
    assert done.stderr.decode().splitlines() == ["save 42 own/tools:latest", "unset"]


def test_a_guest_of_a_failed_script_is_not_saved(guest: Guest, tmp_path: Path) -> None:
    done = saved(guest, tmp_path, "exit 3", "echo saved >&2")
    assert done.returncode == 3
    assert done.stderr == b"vhpc: the guest is not saved as own/tools:latest, because the script failed\n"


@pytest.mark.promise("tools.save-option")
@pytest.mark.parametrize("command", ["echo why >&2; exit 1", "kill -9 $$"])
def test_a_save_that_fails_is_the_jobs_failure(guest: Guest, tmp_path: Path, command: str) -> None:
    done = saved(guest, tmp_path, "true", command)
    assert done.returncode == 1
    assert done.stderr.decode().splitlines()[-1] == (
        "vhpc: the script has succeeded, but its guest is not saved as own/tools:latest"
    )


def test_stdin_may_be_a_file_and_its_end_is_seen(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"abc" * 100000)
    with (tmp_path / "in").open("rb") as stdin, (tmp_path / "out").open("wb") as stdout:
        command: list[str | Path] = [guest.bin / "vhpc-run", "cat"]
        subprocess.run(command, env=guest.env(), stdin=stdin, stdout=stdout, check=True, timeout=WAIT_S)
    assert (tmp_path / "out").read_bytes() == b"abc" * 100000


@pytest.mark.long
def test_a_quarter_gibibyte_passes_each_stream_intact(guest: Guest) -> None:
    size = 256 << 20
    # A stream cipher's keystream: no two places look alike, and any slip shows in the digest.
    make = f"openssl enc -aes-128-ctr -K 00 -iv 00 -nosalt </dev/zero 2>/dev/null | head -c {size}"
    if shutil.which("openssl") is None:
        make = f"seq 100000000 | head -c {size}"
    want = subprocess.run(["sh", "-c", make + " | sha256sum"], capture_output=True, check=True).stdout
    relay = f"{guest.bin}/vhpc-run sh -c 'tee /dev/fd/2'"
    both = f"({make}) | {relay} 2>&3 | sha256sum >&4"
    command = f"exec 4>&1; {{ {both}; }} 3>&1 4>&4 | sha256sum >&4"
    done = subprocess.run(
        ["bash", "-c", command], env=guest.env(), capture_output=True, timeout=200, check=True
    )
    assert done.stdout.splitlines() == want.splitlines() * 2


@pytest.mark.promise("job.streams")
def test_a_reader_that_stalls_stops_no_other(guest: Guest) -> None:
    stalled = guest.popen("sh", "-c", "yes; :")
    time.sleep(0.5)
    try:
        assert guest.run("sh", "-c", "head -c 3000000 /dev/zero | wc -c").stdout == b"3000000\n"
        assert len(guest.run("head", "-c", "3000000", "/dev/zero").stdout) == 3000000
    finally:
        stalled.kill()
        stalled.communicate()


def test_stderr_flows_while_stdout_is_stalled(guest: Guest) -> None:
    run = guest.popen("sh", "-c", "yes & sleep 0.5; for i in $(seq 2000); do echo line $i >&2; done; kill %1")
    assert run.stderr is not None
    for i in range(1, 2001):
        assert run.stderr.readline() == f"line {i}\n".encode()
    run.kill()
    run.communicate()


@pytest.mark.promise("job.streams")
def test_a_closed_pipe_ends_the_writer(guest: Guest) -> None:
    command = f"{guest.bin}/vhpc-run yes | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], env=guest.env(), capture_output=True, timeout=WAIT_S, check=True
    )
    assert done.stdout == b"y\n141\n"


@pytest.mark.promise("job.signals")
def test_background_processes_of_a_program_end_with_it(guest: Guest) -> None:
    done = guest.run("sh", "-c", "setsid sleep 1000 & echo $!")
    assert gone(int(done.stdout))


def test_a_client_that_is_killed_takes_its_session_with_it(guest: Guest) -> None:
    run = guest.popen("sh", "-c", "setsid sleep 1000 & echo $! $$; sleep 1000")
    assert run.stdout is not None
    pids = [int(word) for word in run.stdout.readline().split()]
    run.kill()
    run.communicate()
    assert all(gone(pid) for pid in pids)


def test_a_guest_without_its_share_daemon_ends_its_sessions(programs: Path, tmp_path: Path) -> None:
    """Such a guest would wait for the daemon without end, and its job for the guest."""
    from guest_rig import Guest

    daemons = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    fds = tuple(os.pidfd_open(daemon.pid) for daemon in daemons)
    guest = Guest(programs, tmp_path, watched=fds)
    try:
        run = guest.popen("sh", "-c", "echo up; sleep 1000")
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        daemons[1].kill()
        _, err = run.communicate(timeout=WAIT_S)
        assert run.returncode == 125
        assert b"is gone (the daemon of a shared folder has ended)\n" in err
        late = guest.run("true")
        assert late.returncode == 125
        assert late.stderr.endswith(b" is gone\n"), late
        guest.shim.terminate()  # as the Epilog does; until then it watches the guest's console
        assert guest.shim.wait(WAIT_S) == 0
    finally:
        for daemon, fd in zip(daemons, fds, strict=True):
            daemon.kill()
            daemon.wait()
            os.close(fd)
        guest.close()


@pytest.mark.promise("clean.poweroff")
@pytest.mark.parametrize("order", [("daemon", "guest"), ("guest", "daemon")], ids=" then ".join)
def test_a_shim_ends_with_its_guest_and_the_share_daemons(
    programs: Path, tmp_path: Path, order: tuple[str, str]
) -> None:
    """The Epilog waits for all processes of the guest's uid: a shim that stayed would cost it seconds."""
    from guest_rig import Guest

    daemon = subprocess.Popen(["sleep", "1000"])
    fd = os.pidfd_open(daemon.pid)
    guest = Guest(programs, tmp_path, watched=(fd,))
    try:
        run = guest.popen("sh", "-c", "echo up; sleep 1000")
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        assert guest.agent is not None
        run.send_signal(signal.SIGSTOP)  # a client that takes its time: the shim sees both ends
        ends = {"daemon": daemon.kill, "guest": guest.agent.kill}
        for who in order:
            ends[who]()
            time.sleep(0.2)
        run.send_signal(signal.SIGCONT)
        _, err = run.communicate(timeout=WAIT_S)
        assert run.returncode == 125
        assert b"is gone" in err
        assert guest.shim.wait(WAIT_S) == 0
    finally:
        daemon.kill()
        daemon.wait()
        os.close(fd)
        guest.close()


def test_signals_reach_the_main_process(guest: Guest) -> None:
    run = guest.popen("sh", "-c", "trap 'echo usr1; exit 9' USR1; echo ready; while :; do sleep 0.05; done")
    assert run.stdout is not None
    assert run.stdout.readline() == b"ready\n"
    run.send_signal(signal.SIGUSR1)
    assert run.communicate(timeout=WAIT_S)[0] == b"usr1\n"
    assert run.returncode == 9


def _script_relay(guest: Guest, script: Path) -> subprocess.Popen[bytes]:
    """A vhpc-run that runs this batch script in the guest, as leader of a process group."""
    return subprocess.Popen(
        [guest.bin / "vhpc-run"],
        env=guest.env(VHPC_RUN_SCRIPT="1", VHPC_RUN_ARGV0=str(script)),
        stdout=subprocess.PIPE,
        process_group=0,
    )


@pytest.mark.promise("job.signals")
def test_a_script_gets_its_signal_before_its_commands(guest: Guest, tmp_path: Path) -> None:
    """Else a shell continues when SIGTERM has ended its command; Slurm may signal children first."""
    script = tmp_path / "slurm_script"
    script.write_text("#!/bin/sh\necho up\nsleep 600\necho after\n")
    script.chmod(0o700)
    for pause in (0, 0.05):
        with _script_relay(guest, script) as relay:
            assert relay.stdout is not None
            assert relay.stdout.readline() == b"up\n"
            time.sleep(0.3)  # the command has begun
            (teller,) = Path(f"/proc/{relay.pid}/task/{relay.pid}/children").read_text().split()
            os.kill(int(teller), signal.SIGTERM)
            time.sleep(pause)
            relay.send_signal(signal.SIGTERM)
            assert relay.stdout.read() == b""
            assert relay.wait(WAIT_S) == -signal.SIGTERM


GROUP = r"""#!/bin/bash
trap 'echo main' USR1
trap 'exit 7' TERM
sh -c 'trap "echo background" USR1; echo up; while :; do sleep 0.1; done' &
setsid sh -c 'trap "echo session" USR1; echo up; while :; do sleep 0.1; done' &
while :; do sleep 0.1; done
"""


def test_a_signal_to_a_scripts_group_reaches_background_jobs(guest: Guest, tmp_path: Path) -> None:
    """As `scancel --full`; what has left the group gets nothing, as without a guest."""
    script = tmp_path / "slurm_script"
    script.write_text(GROUP)
    script.chmod(0o700)
    with _script_relay(guest, script) as relay:
        assert relay.stdout is not None
        assert [relay.stdout.readline() for _ in range(2)] == [b"up\n"] * 2
        os.killpg(relay.pid, signal.SIGUSR1)
        assert {relay.stdout.readline() for _ in range(2)} == {b"main\n", b"background\n"}
        relay.send_signal(signal.SIGUSR1)
        assert relay.stdout.readline() == b"main\n"
        time.sleep(0.5)
        relay.send_signal(signal.SIGTERM)
        assert relay.stdout.read() == b""
        assert relay.wait(WAIT_S) == 7
    with pytest.raises(ProcessLookupError):
        os.killpg(relay.pid, 0)
