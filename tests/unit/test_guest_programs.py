# SPDX-License-Identifier: Apache-2.0
"""Programs in a guest: stdio, signals, terminals, limits, host calls, through the real programs."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shutil
import signal
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]

WAIT_S = 30


def _gone(pid: int) -> bool:
    """The process ends within a few seconds (a zombie has ended)."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def _on_a_terminal(guest: Guest, argv: list[str], keys: list[bytes]) -> tuple[bytes, int]:
    """Run vhpc-run on a pty of 33 by 101; each time the screen rests, press the next keys."""
    pid, master = pty.fork()
    if pid == 0:
        time.sleep(0.1)
        os.execve(guest.bin / "vhpc-run", ["vhpc-run", *argv], guest.env(VHPC_RUN_COMMANDS="sh"))
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    screen, until = b"", time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if not select.select([master], [], [], 0.7)[0]:
            if keys:
                os.write(master, keys.pop(0))
            continue
        try:
            data = os.read(master, 65536)
        except OSError:
            break
        if not data:
            break
        screen += data
    os.close(master)
    return screen, os.waitpid(pid, 0)[1]


# --- programs -----------------------------------------------------------------


def test_exit_code_stdout_and_stderr_come_back_apart(guest: Guest) -> None:
    done = guest.run("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


def test_death_by_signal_is_our_death_by_the_same_signal(guest: Guest) -> None:
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM):
        assert guest.run("sh", "-c", f"kill -{number.value} $$").returncode == -number


def test_a_program_that_is_not_there_ends_with_2_and_slurmstepds_words(guest: Guest) -> None:
    done = guest.run("no-such-program")
    assert done.returncode == 2
    assert done.stderr == b"vhpc-run: execve(): no-such-program: No such file or directory\n"


def test_a_script_without_its_interpreter_is_named_as_such(guest: Guest, tmp_path: Path) -> None:
    script = tmp_path / "x.sh"
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)
    done = guest.run(str(script))
    assert done.returncode == 2
    assert b"bad interpreter(/no/such/shell)" in done.stderr


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


def test_what_goes_to_one_file_keeps_its_order(guest: Guest, tmp_path: Path) -> None:
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


def test_a_reader_that_stalls_stops_nobody_else(guest: Guest) -> None:
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


def test_a_closed_pipe_ends_the_writer(guest: Guest) -> None:
    command = f"{guest.bin}/vhpc-run yes | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], env=guest.env(), capture_output=True, timeout=WAIT_S, check=True
    )
    assert done.stdout == b"y\n141\n"


def test_what_a_program_leaves_behind_ends_with_it(guest: Guest) -> None:
    began = time.monotonic()
    done = guest.run("sh", "-c", "setsid sleep 1000 & echo $!")
    assert time.monotonic() - began < 10
    assert _gone(int(done.stdout))


def test_a_client_that_is_killed_takes_its_session_with_it(guest: Guest) -> None:
    run = guest.popen("sh", "-c", "setsid sleep 1000 & echo $! $$; sleep 1000")
    assert run.stdout is not None
    pids = [int(word) for word in run.stdout.readline().split()]
    run.kill()
    run.communicate()
    assert all(_gone(pid) for pid in pids)


def test_a_guest_that_has_lost_the_daemon_of_a_folder_ends_its_sessions(
    programs: Path, tmp_path: Path
) -> None:
    """Such a guest would wait for it, and its job for the guest, for ever."""
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
        assert (late.returncode, late.stderr) == (126, b"vhpc-run: the guest is gone\n")
        guest.shim.terminate()  # as the Epilog does; until then it watches the guest's console
        assert guest.shim.wait(WAIT_S) == 0
    finally:
        for daemon, fd in zip(daemons, fds, strict=True):
            daemon.kill()
            daemon.wait()
            os.close(fd)
        guest.close()


@pytest.mark.parametrize("order", [("daemon", "guest"), ("guest", "daemon")], ids=" then ".join)
def test_a_shim_ends_with_its_guest_whose_folders_daemons_end_too(
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


GROUP = r"""#!/bin/bash
trap 'echo main' USR1
trap 'exit 7' TERM
sh -c 'trap "echo background" USR1; echo up; while :; do sleep 0.1; done' &
setsid sh -c 'trap "echo session" USR1; echo up; while :; do sleep 0.1; done' &
while :; do sleep 0.1; done
"""


def test_a_signal_to_the_process_group_of_a_script_is_for_its_background_commands_too(
    guest: Guest, tmp_path: Path
) -> None:
    """As `scancel --full`; what has left the group gets nothing, as without a guest."""
    script = tmp_path / "slurm_script"
    script.write_text(GROUP)
    script.chmod(0o700)
    with subprocess.Popen(
        [guest.bin / "vhpc-run"],
        env=guest.env(VHPC_RUN_SCRIPT="1", VHPC_RUN_ARGV0=str(script)),
        stdout=subprocess.PIPE,
        process_group=0,
    ) as relay:
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


# --- PMI ----------------------------------------------------------------------


def _step(port: int = 0, **more: str) -> dict[str, str]:
    """What slurmstepd sets for a task of two, by mpi/pmi2 or, with a port, by mpi/pmix (seen on 24.11)."""
    pmix = {
        "PMIX_NAMESPACE": "slurm.pmix.42.1",
        "PMIX_RANK": "1",
        "PMIX_SERVER_URI41": f"pmix-server.6169;tcp4://127.0.0.1:{port}",
        "PMIX_SERVER_URI2": f"pmix-server.6169;tcp4://127.0.0.1:{port}",
        "SLURM_PMIX_MAPPING_SERV": "(vector,(0,1,2))",
    }
    pmi2 = {"PMI_FD": "64", "PMI_JOBID": "42.1", "PMI_RANK": "1", "PMI_SIZE": "2"}
    own = {"SLURM_JOB_ID": "42", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    return own | {"SLURM_MPI_TYPE": "pmix" if port else "pmi2"} | (pmix if port else pmi2) | more


# As MPICH begins, and as a PMIx client finds its server.
USE_PMI = """
import os, socket, sys, time
print("before", flush=True)
if "PMI_FD" in os.environ:
    os.write(int(os.environ["PMI_FD"]), b"cmd=init pmi_version=1 pmi_subversion=1\\n")
else:
    port = int(os.environ["PMIX_SERVER_URI41"].rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).recv(1)
time.sleep(60)
"""


def _in_step(guest: Guest, step: dict[str, str], *argv: str) -> subprocess.CompletedProcess[bytes]:
    """Run a program with the variables of a step."""
    command: list[str | Path] = [guest.bin / "vhpc-run", "--", *argv]
    env = guest.env() | step
    return subprocess.run(command, env=env, input=b"", capture_output=True, timeout=WAIT_S, check=False)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.mark.parametrize("kind", ["pmi2", "pmix"])
def test_a_program_of_several_tasks_that_uses_pmi_is_ended_with_one_line_per_guest(
    guest: Guest, kind: str
) -> None:
    step = _step(_free_port() if kind == "pmix" else 0)
    first = _in_step(guest, step, "python3", "-c", USE_PMI)
    assert (first.returncode, first.stdout) == (126, b"before\n")
    assert first.stderr.startswith(b"vhpc: step 42.1 runs an MPI program in several tasks")
    assert f"srun --mpi={kind}".encode() in first.stderr
    assert first.stderr.count(b"\n") == 1
    second = _in_step(guest, step, "python3", "-c", USE_PMI)
    assert (second.returncode, second.stdout, second.stderr) == (126, b"before\n", b"")
    another = _in_step(guest, step | {"SLURM_STEP_ID": "2"}, "python3", "-c", USE_PMI)
    assert another.stderr.startswith(b"vhpc: step 42.2 ")


def test_tasks_of_a_step_share_their_pmix_server(guest: Guest) -> None:
    step = _step(_free_port())
    idle = guest.popen("sh", "-c", "echo up; sleep 1000", **step)
    assert idle.stdout is not None
    assert idle.stdout.readline() == b"up\n"
    assert _in_step(guest, step, "python3", "-c", USE_PMI).returncode == 126
    idle.communicate(timeout=WAIT_S)
    assert idle.returncode == 126
    # and it is gone with the last of them
    assert _in_step(guest, step | {"VHPC_PMI": ""}, "python3", "-c", USE_PMI).returncode == 126


@pytest.mark.parametrize("kind", ["pmi2", "pmix"])
def test_a_program_that_does_not_use_pmi_notices_nothing(guest: Guest, kind: str) -> None:
    step = _step(_free_port() if kind == "pmix" else 0)
    done = _in_step(guest, step, "sh", "-c", "env; exit 3")
    assert (done.returncode, done.stderr) == (3, b"")
    for name in ("PMIX_RANK", "PMIX_SERVER_URI41") if kind == "pmix" else ("PMI_RANK", "PMI_SIZE"):
        assert f"{name}={step[name]}\n".encode() in done.stdout


@pytest.mark.parametrize("kind", ["pmi2", "pmix"])
@pytest.mark.parametrize("why", [{"SLURM_STEP_NUM_TASKS": "1"}, {"VHPC_PMI": "singleton"}])
def test_a_single_task_and_singletons_on_purpose_have_no_pmi(
    guest: Guest, kind: str, why: dict[str, str]
) -> None:
    done = _in_step(guest, _step(_free_port() if kind == "pmix" else 0) | why, "env")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"PMI_" not in done.stdout.replace(b"VHPC_PMI", b"")
    assert b"PMIX_" not in done.stdout


def test_a_component_of_a_het_step_is_not_a_single_task(guest: Guest) -> None:
    done = _in_step(guest, _step(SLURM_STEP_NUM_TASKS="1", SLURM_HET_SIZE="2"), "python3", "-c", USE_PMI)
    assert done.returncode == 126


def test_a_wrong_value_of_vhpc_pmi_is_an_error(guest: Guest) -> None:
    done = guest.run("env", VHPC_PMI="singletons", SLURM_LOCALID="0")
    assert (done.returncode, done.stdout) == (64, b"")
    assert done.stderr == b"vhpc: VHPC_PMI=singletons: must be refuse or singleton\n"


def test_where_pmi_cannot_be_watched_the_task_is_refused(guest: Guest) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = _in_step(guest, _step(taken.getsockname()[1]), "true")
    assert done.returncode == 126
    assert b"Address already in use" in done.stderr
    elsewhere = _step(1) | {"PMIX_SERVER_URI41": "pmix-server.1;tcp4://10.0.0.1:1"}
    assert _in_step(guest, elsewhere, "true").returncode == 126


def test_an_agent_that_does_not_know_of_pmi_starts_nothing_that_could_use_it(late_guest: Guest) -> None:
    from vhpc_slurm.node.guest import wire

    run = late_guest.popen("true", **_step())
    end = wire.FrameStream(late_guest.agent_end)
    until = time.monotonic() + WAIT_S
    hello = wire.put(wire.Tag.VERSION_MIN, 1) + wire.put(wire.Tag.VERSION_MAX, 1)
    end.send(wire.FrameType.HELLO, hello, until)
    late_guest.agent_end.settimeout(WAIT_S)
    header = b""
    while not header or header[4] != 4:  # EXEC
        header = late_guest.agent_end.recv(16, socket.MSG_WAITALL)
        late_guest.agent_end.recv(int.from_bytes(header[:4], "little"), socket.MSG_WAITALL)
    late_guest.agent_end.sendall(struct.pack("<IBBHII", 0, 5, 0, 0, 1, 0))  # STARTED
    _, err = run.communicate(timeout=WAIT_S)
    assert run.returncode == 126
    assert b"the agent of the image is too old" in err
    header = late_guest.agent_end.recv(16, socket.MSG_WAITALL)
    assert header[4] == 13  # CLOSE


# --- terminals ----------------------------------------------------------------


def _is_stopped(pid: int) -> bool:
    """By a signal, or where the system has cgroup v2 with its cgroup."""
    if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
        return True
    own = Path(f"/proc/{pid}/cgroup").read_text().splitlines()[-1].removeprefix("0::").lstrip("/")
    places = [Path("/sys/fs/cgroup/unified") / own, Path("/sys/fs/cgroup") / own]
    events = [place / "cgroup.events" for place in places]
    return any("frozen 1" in event.read_text() for event in events if event.exists())


def _becomes(pid: int, stopped: bool) -> bool:
    """The process is stopped, or goes on, within some seconds."""
    until = time.monotonic() + WAIT_S
    while _is_stopped(pid) != stopped and time.monotonic() < until:
        time.sleep(0.05)
    return _is_stopped(pid) == stopped


@pytest.fixture
def catcher(guest: Guest) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A program that catches SIGTSTP, and has just done so: its relay and its own pid."""
    script = "trap 'echo caught' TSTP; echo $$; while :; do sleep 0.1; done"
    relay = guest.popen("bash", "-c", script)
    assert relay.stdout is not None
    pid = int(relay.stdout.readline())
    relay.send_signal(signal.SIGTSTP)
    assert relay.stdout.readline() == b"caught\n"
    yield relay, pid
    relay.kill()
    relay.communicate(timeout=WAIT_S)


def test_a_program_that_catches_sigtstp_is_stopped_with_its_relay(
    catcher: tuple[subprocess.Popen[bytes], int],
) -> None:
    """As Slurm suspends: SIGTSTP to all, soon after it what cannot be caught."""
    relay, pid = catcher
    relay.send_signal(signal.SIGSTOP)
    assert _becomes(pid, stopped=True)
    relay.send_signal(signal.SIGCONT)
    assert _becomes(pid, stopped=False)


@pytest.mark.long
def test_a_program_is_stopped_with_its_relay_and_goes_on_with_it(guest: Guest) -> None:
    """SIGSTOP cannot be caught, so no relay can pass it on."""
    script = "i=0; echo $$; while :; do i=$((i + 1)); echo $i >&2; sleep 0.1; done"
    relay = guest.popen("bash", "-c", script)
    assert relay.stdout is not None
    pid = int(relay.stdout.readline())
    try:
        for _ in range(2):
            relay.send_signal(signal.SIGSTOP)
            assert _becomes(pid, stopped=True)
            time.sleep(2.5)  # some looks later
            assert _is_stopped(pid)
            relay.send_signal(signal.SIGCONT)
            assert _becomes(pid, stopped=False)
    finally:
        relay.kill()
        relay.communicate(timeout=WAIT_S)


def test_a_relay_that_is_not_stopped_after_sigtstp_shows_it(
    catcher: tuple[subprocess.Popen[bytes], int],
) -> None:
    _, pid = catcher
    time.sleep(3)  # longer than the silence that is taken for a stop
    assert _becomes(pid, stopped=False)


def test_a_terminal_has_its_size_and_reads_lines(guest: Guest) -> None:
    screen, status = _on_a_terminal(
        guest, ["sh", "-c", "tty; stty size; read x; echo got $x; exit 3"], [b"hello\r"]
    )
    assert b"/dev/pts/" in screen
    assert b"33 101\r\n" in screen
    assert screen.endswith(b"hello\r\ngot hello\r\n")
    assert os.waitstatus_to_exitcode(status) == 3


def test_control_c_interrupts_and_control_d_ends(guest: Guest) -> None:
    assert os.waitstatus_to_exitcode(_on_a_terminal(guest, ["sleep", "100"], [b"\x03"])[1]) == -signal.SIGINT
    assert os.waitstatus_to_exitcode(_on_a_terminal(guest, ["cat"], [b"\x04"])[1]) == 0


# --- host calls ---------------------------------------------------------------


def test_a_host_command_runs_on_the_host_with_stdio_and_status(guest: Guest) -> None:
    # The middle shell is the guest's, the inner one the host's: its parent is vhpc-run.
    command = f"echo in | {guest.bin}/vhpc-agent --call sh -c 'cat; ps -o comm= -p $PPID; exit 5'; echo $?"
    done = guest.run("sh", "-c", command, VHPC_RUN_COMMANDS="srun:sh")
    assert done.stdout == b"in\nvhpc-run\n5\n"


def test_a_host_command_has_its_callers_limits_umask_and_niceness(guest: Guest) -> None:
    inner = "ulimit -Sn; ulimit -Hn; umask; nice"
    command = (
        f"umask 027; ulimit -n 300; ulimit -Sn 200; nice -n 3 {guest.bin}/vhpc-agent --call sh -c '{inner}'"
    )
    done = guest.run("sh", "-c", command, VHPC_RUN_COMMANDS="sh")
    assert done.stdout.split() == [b"200", b"300", b"0027", b"3"]


def test_only_allowed_commands_run_on_the_host(guest: Guest) -> None:
    for allowed in ("", "srun", "srun:shx:s"):
        done = guest.run(
            f"{guest.bin}/vhpc-agent", "--call", "sh", "-c", "echo no", VHPC_RUN_COMMANDS=allowed
        )
        assert done.returncode == 126
        assert done.stdout == b""
        assert b"guests may not run this command on the host" in done.stderr


def test_a_host_command_is_found_on_the_hosts_own_path_only(guest: Guest, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "vhpc-test-command"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho mine\n")
    fake.chmod(0o755)
    call, name = f"{guest.bin}/vhpc-agent", fake.name
    path = f"{fake.parent}:{os.environ['PATH']}"
    done = guest.run(call, "--call", name, VHPC_RUN_COMMANDS=name, PATH=path)
    assert done.returncode == 2
    assert guest.run(call, "--call", str(fake), VHPC_RUN_COMMANDS=name, PATH=path).returncode == 2
    done = guest.run(call, "--call", name, VHPC_RUN_COMMANDS=name, VHPC_RUN_COMMAND_PATH=str(fake.parent))
    assert done.stdout == b"mine\n"


def test_a_host_command_ends_when_its_caller_does(guest: Guest) -> None:
    command = (
        f"{guest.bin}/vhpc-agent --call sh -c 'echo $$; exec sleep 1000' & sleep 0.5; kill -9 $!; sleep 1"
    )
    done = guest.run("sh", "-c", command, VHPC_RUN_COMMANDS="sh")
    assert _gone(int(done.stdout))


def test_a_host_command_outside_of_a_session_is_refused(guest: Guest) -> None:
    assert guest.run("true").returncode == 0  # the agent is up, and listens
    call: list[str | Path] = [guest.bin / "vhpc-agent", "--call", "sh", "-c", "echo no"]
    done = subprocess.run(call, env=guest.env(), capture_output=True, timeout=WAIT_S, check=False)
    assert done.returncode == 126
    assert b"not started by a Slurm job" in done.stderr


def test_a_host_command_on_a_terminal_has_one(guest: Guest) -> None:
    argv = [f"{guest.bin}/vhpc-agent", "--call", "sh", "-c", "stty size; read x; echo host $x; exit 4"]
    screen, status = _on_a_terminal(guest, argv, [b"hey\r"])
    assert b"33 101\r\n" in screen
    assert b"host hey\r\n" in screen
    assert os.waitstatus_to_exitcode(status) == 4
