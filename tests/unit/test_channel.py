"""The guest channel with its real programs: agent and shim over a socketpair, no guest between them.

What passes here has gone through vhpc-run, vhpc-shim and vhpc-agent; only the
virtio-serial port is a socket, and the agent changes nothing of this machine.
"""

from __future__ import annotations

import fcntl
import hashlib
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

import pytest

from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.channel import ChannelError, ChannelRefusedError, GuestChannel

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 30


def _built() -> Path | None:
    """Where vhpc-agent, -shim and -run are, when they were built before; plain builds first."""
    named = os.environ.get("VHPC_GUEST_BIN")
    places = [Path(named)] if named else [p.parent for p in sorted(ROOT.glob("build/**/vhpc-agent"))]
    sound = [
        p for p in places if all((p / name).is_file() for name in ("vhpc-agent", "vhpc-shim", "vhpc-run"))
    ]
    return next((p for p in sound if "asan" not in str(p)), sound[0] if sound else None)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = _built()
    if found is not None:
        return found
    if shutil.which("cmake") is None:
        pytest.skip("guest/ is not built and cmake is not there")
    build = tmp_path_factory.mktemp("guest-build")
    options = ["-DBUILD_TESTING=OFF", "-DCMAKE_BUILD_TYPE="]
    subprocess.run(["cmake", "-S", ROOT / "guest", "-B", build, *options], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build], check=True, capture_output=True)
    return build


class Guest:
    """A shim and an agent of our own, and ways to run programs in the 'guest'."""

    def __init__(self, programs: Path, folder: Path, agent: bool = True) -> None:
        self.bin, self.folder, self.socket = programs, folder, folder / "run.sock"
        self.call_socket = folder / "call.sock"
        self.agent_end, shim_end = socket.socketpair()
        self.agent: subprocess.Popen[bytes] | None = None
        with shim_end, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.socket))
            listener.listen(64)
            fds = (shim_end.fileno(), listener.fileno())
            self.shim = subprocess.Popen(
                [
                    programs / "vhpc-shim",
                    f"--agent-fd={fds[0]}",
                    f"--listen-fd={fds[1]}",
                    f"--uid={os.getuid()}",
                ],
                pass_fds=fds,
            )
        if agent:
            self.start_agent()

    def start_agent(self) -> None:
        fd = self.agent_end.fileno()
        args = ["--no-system", f"--fd={fd}", f"--call-socket={self.call_socket}"]
        self.agent = subprocess.Popen([self.bin / "vhpc-agent", *args], pass_fds=(fd,))
        self.agent_end.close()

    def env(self, **more: str) -> dict[str, str]:
        own = {"VHPC_RUN_SOCKET": str(self.socket), "VHPC_CALL_SOCKET": str(self.call_socket)}
        return {**os.environ, **own, **more}

    def run(self, *argv: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
        command = [str(self.bin / "vhpc-run"), "--", *argv]
        return subprocess.run(
            command, input=stdin, env=self.env(**env), capture_output=True, timeout=WAIT_S, check=False
        )

    def popen(self, *argv: str, **env: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(self.bin / "vhpc-run"), "--", *argv],
            env=self.env(**env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def close(self) -> None:
        self.agent_end.close()
        self.shim.terminate()
        self.shim.wait(WAIT_S)
        if self.agent is not None:
            self.agent.wait(WAIT_S)


@pytest.fixture
def guest(programs: Path, tmp_path: Path) -> Iterator[Guest]:
    it = Guest(programs, tmp_path)
    yield it
    it.close()


def _gone(pid: int) -> bool:
    """The process ends within a few seconds (a zombie has ended)."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
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
        command = [guest.bin / "vhpc-run", "cat"]
        subprocess.run(command, env=guest.env(), stdin=stdin, stdout=stdout, check=True, timeout=WAIT_S)
    assert (tmp_path / "out").read_bytes() == b"abc" * 100000


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


def test_signals_reach_the_main_process(guest: Guest) -> None:
    run = guest.popen("sh", "-c", "trap 'echo usr1; exit 9' USR1; echo ready; while :; do sleep 0.05; done")
    assert run.stdout is not None
    assert run.stdout.readline() == b"ready\n"
    run.send_signal(signal.SIGUSR1)
    assert run.communicate(timeout=WAIT_S)[0] == b"usr1\n"
    assert run.returncode == 9


# --- terminals ----------------------------------------------------------------


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


def test_only_allowed_commands_run_on_the_host(guest: Guest) -> None:
    for allowed in ("", "srun", "srun:shx:s"):
        done = guest.run(
            f"{guest.bin}/vhpc-agent", "--call", "sh", "-c", "echo no", VHPC_RUN_COMMANDS=allowed
        )
        assert done.returncode == 126
        assert done.stdout == b""
        assert b"not among the commands that guests may run on the host" in done.stderr


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
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        channel.hello()
    call = [guest.bin / "vhpc-agent", "--call", "sh", "-c", "echo no"]
    done = subprocess.run(call, env=guest.env(), capture_output=True, timeout=WAIT_S, check=False)
    assert done.returncode == 126
    assert b"not started by a Slurm job" in done.stderr


def test_a_host_command_on_a_terminal_has_one(guest: Guest) -> None:
    argv = [f"{guest.bin}/vhpc-agent", "--call", "sh", "-c", "stty size; read x; echo host $x; exit 4"]
    screen, status = _on_a_terminal(guest, argv, [b"hey\r"])
    assert b"33 101\r\n" in screen
    assert b"host hey\r\n" in screen
    assert os.waitstatus_to_exitcode(status) == 4


# --- a guest that is late, silent or gone ------------------------------------


def test_a_lost_guest_is_one_line_and_125(guest: Guest) -> None:
    run = guest.popen("sleep", "1000", SLURM_JOB_ID="42", SLURMD_NODENAME="n1", VHPC_RUN_CONSOLE="/c.log")
    time.sleep(0.3)
    assert guest.agent is not None
    guest.agent.kill()
    errors = run.communicate(timeout=WAIT_S)[1]
    assert run.returncode == 125
    assert errors == b"vhpc: the guest of job 42 on n1 is gone (channel closed); its console: /c.log\n"


def test_a_program_waits_for_a_guest_that_is_still_booting(programs: Path, tmp_path: Path) -> None:
    it = Guest(programs, tmp_path, agent=False)
    try:
        run = it.popen("echo", "late")
        time.sleep(0.3)
        assert run.poll() is None
        it.start_agent()
        assert run.communicate(timeout=WAIT_S)[0] == b"late\n"
    finally:
        it.close()


def test_a_guest_that_stays_silent_is_given_up(programs: Path, tmp_path: Path) -> None:
    it = Guest(programs, tmp_path, agent=False)
    try:
        done = it.run("true", VHPC_RUN_TIMEOUT="1")
        assert done.returncode == 125
        assert b"does not answer" in done.stderr
        with (
            GuestChannel.connect(it.socket, 5) as channel,
            pytest.raises(ChannelError, match="does not answer"),
        ):
            channel.hello(0.3)
    finally:
        it.close()


# --- the control client --------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0, reason="control operations are root's")
def test_control_operations_answer(guest: Guest) -> None:
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        assert channel.hello().kernel == os.uname().release
        assert channel.ping() < 5
        channel.identity(
            "n1",
            hosts=["10.0.0.1 n1"],
            name="alice",
            uid=2001,
            gid=2001,
            home="/home/alice",
            groups=[("alice", 2001), ("project", 4000)],
            commands=["srun"],
        )
        channel.mount("home", "/home/alice")
        info = channel.ready()
        assert info.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert info.cpus == os.sysconf("SC_NPROCESSORS_ONLN")
        assert info.memory_kib == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024
        assert channel.info().sessions == 0


@pytest.mark.skipif(os.getuid() != 0, reason="control operations are root's")
def test_an_identity_of_many_frames_arrives_whole(guest: Guest) -> None:
    hosts = [f"10.{i >> 8}.{i & 255}.1 node{i}" for i in range(20000)]
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        channel.identity("n1", hosts=hosts)
        with pytest.raises(ChannelRefusedError, match="/etc/hosts"):
            channel.identity("n1", hosts=[*hosts, "bad\nline"])


@pytest.mark.skipif(os.getuid() != 0, reason="control operations are root's")
def test_a_refusal_says_why_and_the_channel_goes_on(guest: Guest) -> None:
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        with pytest.raises(ChannelRefusedError, match="no place to mount") as caught:
            channel.mount("t", "/etc")
        assert caught.value.errno == 22
        assert channel.ping() < 5


@pytest.mark.skipif(os.getuid() != 0, reason="control operations are root's")
def test_poweroff_is_answered_and_ends_the_channel(guest: Guest) -> None:
    run = guest.popen("sleep", "1000")
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        channel.poweroff()
        assert guest.agent is not None
        assert guest.agent.wait(WAIT_S) == 0
        with pytest.raises(ChannelError):
            channel.ping()
    assert run.wait(WAIT_S) == 125
    run.communicate()


def test_no_shim_is_the_nodes_failure(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="cannot connect"):
        GuestChannel.connect(tmp_path / "run.sock", 0.2)


def test_a_guest_that_talks_nonsense_is_a_channel_error(programs: Path, tmp_path: Path) -> None:
    it = Guest(programs, tmp_path, agent=False)
    try:
        with GuestChannel.connect(it.socket, 5) as channel:
            it.agent_end.sendall(hashlib.sha256(b"nonsense").digest())
            with pytest.raises(ChannelError, match=r"broke the channel's protocol|closed"):
                channel.hello()
        assert it.shim.wait(WAIT_S) == 3
    finally:
        it.close()
