# SPDX-License-Identifier: Apache-2.0
"""X11 of steps in a guest: connections to the display that Slurm forwards, through the real programs."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from guest_rig import WAIT_S, Guest
from hostile_guest import HostileGuest, command, frame
from pmi_rig import in_step

from vhpc_slurm.node.guest import wire
from x11_programs import CLIENT, COOKIE, SERVER, authority

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest_plugins = ["guest_rig"]

PORTS = range(6020, 6100)
"""Those of Slurm (src/slurmd/slurmstepd/x11_forwarding.c)."""
LOCAL, WILD = 256, 65535
MAGIC = b"MIT-MAGIC-COOKIE-1"
NOBODY = 65534
# In a network namespace of its own, as a guest is: the display's port is taken on the host.
APART = ("unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
VARIABLES = "import os; print(os.environ.get('DISPLAY'), os.environ.get('XAUTHORITY'))"
LISTENERS = "cat /proc/net/tcp /proc/net/tcp6"


class FarGuest(Guest):
    """A guest whose agent and programs have another loopback interface than the host."""

    def start_agent(self) -> None:
        fd = self.agent_end.fileno()
        options = ["--no-system", f"--fd={fd}", f"--call-socket={self.call_socket}"]
        self.agent = subprocess.Popen([*APART, self.bin / "vhpc-agent", *options], pass_fds=(fd,))
        self.agent_end.close()


@pytest.fixture
def far_guest(programs: Path, tmp_path: Path) -> Iterator[FarGuest]:
    if os.getuid() != 0:
        pytest.skip("only root may make a network namespace: run as root")
    it = FarGuest(programs, tmp_path)
    yield it
    it.close()


@dataclass
class Display:
    """A listening socket as that of slurmstepd, and the authority file that Slurm writes with xauth."""

    port: int
    file: Path
    server: subprocess.Popen[str]

    @property
    def number(self) -> int:
        return self.port - 6000

    def step(self, **more: str) -> dict[str, str]:
        """What Slurm sets for a task of srun --x11."""
        return {"DISPLAY": f"localhost:{self.number}.0", "XAUTHORITY": str(self.file)} | more

    def write(self, *entries: bytes) -> None:
        self.file.write_bytes(b"".join(entries))

    def heard(self) -> str:
        """The next client's authorization."""
        assert self.server.stdout is not None
        return self.server.stdout.readline().strip()


def free_port() -> int:
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("all ports of X11 are taken")


def serve(tmp_path: Path, port: int, address: str = "127.0.0.1", uid: int = 0) -> Display:
    own = f"import os, socket, struct, sys, threading\nos.seteuid({uid})\n"  # as slurmstepd does
    argv = ("python3", "-c", own + SERVER, address, str(port))
    display = Display(
        port, tmp_path / "Xauthority", subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    )
    host = os.uname().nodename.encode()
    display.write(authority(LOCAL, host, str(display.number).encode(), MAGIC, COOKIE))
    assert display.heard() == "listens"
    return display


def end(display: Display) -> None:
    display.server.kill()
    display.server.communicate(timeout=WAIT_S)


@pytest.fixture
def display(tmp_path: Path) -> Iterator[Display]:
    it = serve(tmp_path, free_port())
    yield it
    end(it)


def start(guest: Guest, step: dict[str, str], *words: str) -> subprocess.Popen[bytes]:
    """A client in the guest, connected when it has printed the status of its setup."""
    client = guest.popen("python3", "-c", CLIENT, *words, **step)
    assert client.stdout is not None
    assert client.stdout.readline() == b"setup b'\\x01'\n", client.communicate(timeout=WAIT_S)
    return client


@pytest.mark.promise("job.x11")
def test_a_program_reaches_the_display_with_its_cookie(far_guest: FarGuest, display: Display) -> None:
    done = in_step(far_guest, display.step(), "python3", "-c", CLIENT, "hello", "x" * 100_000)
    assert (done.stderr, done.stdout) == (b"", b"setup b'\\x01'\nHELLO\n%s\n" % (b"X" * 100_000))
    assert display.heard() == f"{MAGIC.decode()} {COOKIE.hex()}"


@pytest.mark.promise("job.x11")
def test_the_cookie_is_in_a_file_of_the_user_alone(far_guest: FarGuest, display: Display) -> None:
    done = in_step(
        far_guest, display.step(), "sh", "-c", 'stat -c "%a %u" $XAUTHORITY; python3 -c "$0"', VARIABLES
    )
    mode, shown = done.stdout.decode().splitlines()
    assert mode == f"600 {os.getuid()}"
    file = far_guest.folder / f"x11.{display.number}" / "Xauthority"
    assert shown == f"localhost:{display.number}.0 {file}"
    assert not file.parent.exists(), "it is removed with the last step"
    with far_guest.popen("cat", **display.step()) as step:
        done = in_step(far_guest, display.step(), "cat", str(file))
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        step.communicate(timeout=WAIT_S)
    assert done.stdout == authority(WILD, b"", str(display.number).encode(), MAGIC, COOKIE)


@pytest.mark.promise("job.x11")
def test_a_connection_lives_as_long_as_its_own_step(far_guest: FarGuest, display: Display) -> None:
    for first_to_end in (0, 1, 2):
        with ExitStack() as stack:
            steps = [stack.enter_context(start(far_guest, display.step(), "-")) for _ in range(3)]
            ending = steps.pop(first_to_end)
            ending.terminate()
            ending.communicate(timeout=WAIT_S)
            assert [step.poll() for step in steps] == [None, None]
            again = in_step(far_guest, display.step(), "python3", "-c", CLIENT, "more")
            assert again.stdout.endswith(b"MORE\n"), again.stderr
            for step in steps:
                step.terminate()
                assert step.communicate(timeout=WAIT_S)[0] == b"", "its connection has not ended before"


@pytest.mark.promise("job.x11")
def test_the_end_of_the_display_reaches_the_program(far_guest: FarGuest, display: Display) -> None:
    with start(far_guest, display.step(), "-") as client:
        display.server.kill()
        assert client.communicate(timeout=WAIT_S) == (b"end b''\n", b"")
        assert client.returncode == 0


@pytest.mark.promise("job.x11")
def test_a_display_of_a_login_shell_stays_as_it_is(far_guest: FarGuest, display: Display) -> None:
    free = free_port() - 6000
    for shown in (":0", "localhost:10.0", f"login:{display.number}.0", f"localhost:{free}.0", "localhost:"):
        step = display.step(DISPLAY=shown)
        done = in_step(far_guest, step, "sh", "-c", f'python3 -c "$0"; {LISTENERS}', VARIABLES)
        assert done.stderr == b""
        own, *sockets = done.stdout.decode().splitlines()
        assert own == f"{shown} {display.file}"
        assert [line for line in sockets if re.search(r":17[89A-D]\w [0-9A-F]+:0000 0A", line)] == []


@pytest.mark.promise("job.x11", "attack.relay")
@pytest.mark.parametrize(("address", "uid"), [("127.0.0.1", NOBODY), ("0.0.0.0", 0)])
def test_no_socket_but_slurms_for_this_user_is_a_display(
    far_guest: FarGuest, tmp_path: Path, address: str, uid: int
) -> None:
    other = serve(tmp_path, free_port(), address, uid)
    try:
        done = in_step(far_guest, other.step(), "python3", "-c", VARIABLES)
        assert done.stdout.decode() == f"localhost:{other.number}.0 {other.file}\n"
        assert done.stderr == b""
        refused = in_step(far_guest, other.step(), "python3", "-c", CLIENT)
        assert b"ConnectionRefusedError" in refused.stderr
    finally:
        end(other)


@pytest.mark.promise("attack.relay")
def test_a_guest_cannot_choose_what_it_reaches(late_guest: Guest, display: Display) -> None:
    with late_guest.popen("true", **display.step(DISPLAY=":0")) as run:
        hostile = HostileGuest(late_guest)
        hostile.begin()
        body = command("x11", fds=bytes((0, 3)), **display.step())
        hostile.send(frame(wire.FrameType.EXEC, body, call=1))
        while (answer := hostile.hear()).call != 1:
            pass
        assert answer.kind == wire.FrameType.ERROR
        assert b"guests may not run this command on the host" in answer.payload
        run.kill()


@pytest.mark.promise("job.x11")
def test_a_display_without_a_cookie_is_one_line(far_guest: FarGuest, display: Display) -> None:
    number, host = str(display.number).encode(), os.uname().nodename.encode()
    for entry in (
        b"",
        authority(LOCAL, b"login", number, MAGIC, COOKIE),
        authority(LOCAL, host, number + b"1", MAGIC, COOKIE),
        authority(LOCAL, host, number, b"XDM-AUTHORIZATION-1", COOKIE),
        authority(LOCAL, host, number, MAGIC, COOKIE[:-1]),
        authority(LOCAL, host, number, MAGIC, COOKIE)[:-1],
    ):
        display.write(entry)
        done = in_step(far_guest, display.step(), "python3", "-c", VARIABLES)
        assert done.stdout.decode() == f"localhost:{display.number}.0 {display.file}\n"
        assert done.stderr.decode() == (
            f"vhpc: no X11 in the guest: {display.file} has no MIT-MAGIC-COOKIE-1 for "
            f"DISPLAY=localhost:{display.number}.0\n"
        )
        assert in_step(far_guest, display.step(SLURM_LOCALID="1"), "true").stderr == b""
    display.file.unlink()
    done = in_step(far_guest, display.step(), "true")
    assert done.stderr.decode() == (
        f"vhpc: no X11 in the guest: cannot read {display.file}: No such file or directory\n"
    )


def test_a_cookie_may_be_in_the_home_of_the_user(far_guest: FarGuest, display: Display) -> None:
    (display.file.parent / ".Xauthority").write_bytes(display.file.read_bytes())
    step = {"DISPLAY": f"localhost:{display.number}.0", "HOME": str(display.file.parent)}
    display.file.unlink()
    done = in_step(far_guest, step, "env", "-u", "HOME", "python3", "-c", CLIENT)
    assert (done.stderr, display.heard()) == (b"", f"{MAGIC.decode()} {COOKIE.hex()}")


@pytest.mark.promise("job.x11")
def test_a_port_that_the_guest_uses_is_one_line(far_guest: FarGuest, display: Display) -> None:
    taken = f"""
import socket
with socket.create_server(("127.0.0.1", {display.port})):
    print(1, flush=True)
    input()
"""
    with far_guest.popen("python3", "-c", taken) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        done = in_step(far_guest, display.step(), "python3", "-c", VARIABLES)
        other.communicate(b"\n", timeout=WAIT_S)
    assert done.stdout.decode() == f"localhost:{display.number}.0 {display.file}\n"
    line = f"vhpc: no X11 in the guest: another program there uses port {display.port}\n"
    assert done.stderr.decode() == line


@pytest.mark.promise("job.x11")
def test_an_old_agent_is_one_line(late_guest: Guest, display: Display) -> None:
    with late_guest.popen("true", **display.step()) as run:
        hostile = HostileGuest(late_guest)
        hostile.begin()
        hostile.send(frame(wire.FrameType.EXIT, wire.put(wire.Tag.EXIT_CODE, 0)))
        out, err = run.communicate(timeout=WAIT_S)
    assert (run.returncode, out) == (0, b"")
    assert err == b"vhpc: no X11 in the guest: the agent of the image is too old: rebuild the image\n"


def test_commands_on_the_host_have_the_file_of_the_host(far_guest: FarGuest, display: Display) -> None:
    call = f"{far_guest.bin}/vhpc-agent --call sh -c 'echo $XAUTHORITY'"
    script = f"{call}; XAUTHORITY=/own {call}"
    done = in_step(far_guest, display.step(VHPC_RUN_COMMANDS="sh"), "sh", "-c", script)
    assert done.stdout.decode().split() == [str(display.file), "/own"]
