# SPDX-License-Identifier: Apache-2.0
"""vhpc forward with the real program of the guest; srun is a script that starts it on this host."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from guest_processes import gone

if TYPE_CHECKING:
    from guest_rig import Guest
    from step_rig import StepSite

pytest_plugins = ["guest_rig", "step_rig"]
MIB = 1 << 20
WAIT_S = 60


@contextlib.contextmanager
def server(handle: Callable[[socket.socket], object], family: int = socket.AF_INET) -> Iterator[int]:
    """A server in the "guest"; yields its port."""
    address = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((address, 0), family=family) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                handle(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def all_of(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def digest_after_the_end(connection: socket.socket) -> None:
    """Answers only when the client has half-closed."""
    data = all_of(connection)
    connection.sendall(hashlib.sha256(data).hexdigest().encode())


def ended_by_reset(connection: socket.socket) -> bool:
    try:
        all_of(connection)
    except ConnectionResetError:
        return True
    return False


class Forwarded:
    """A running vhpc forward."""

    def __init__(self, site: StepSite, process: subprocess.Popen[bytes]) -> None:
        self.site, self.process = site, process
        assert process.stderr is not None
        self.line = process.stderr.readline().decode()
        found = re.search(r"127\.0\.0\.1:(\d+) leads to", self.line)
        self.port = int(found[1]) if found else 0

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), WAIT_S)

    def said(self) -> str:
        """Its standard error, once it has ended."""
        return self.process.communicate(timeout=WAIT_S)[1].decode()


def is_refused(it: Forwarded) -> bool:
    """Whether a connection is reset, as soon as it is made or later."""
    try:
        with it.connect() as connection:
            return ended_by_reset(connection)
    except ConnectionResetError:
        return True


@contextlib.contextmanager
def forwarded(site: StepSite, *words: str) -> Iterator[Forwarded]:
    process = site.start("forward", "7", *words)
    try:
        yield Forwarded(site, process)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.promise("tools.forward")
def test_connections_at_once_arrive_unchanged(site: StepSite) -> None:
    with server(digest_after_the_end) as port, forwarded(site, f"0:{port}") as it:
        assert it.port not in (0, port)
        assert "other users of this host can connect to it" in it.line
        data = [os.urandom(5 * MIB) for _ in range(10)]
        answers: dict[int, bytes] = {}

        def client(number: int) -> None:
            with it.connect() as connection:
                connection.sendall(data[number])
                connection.shutdown(socket.SHUT_WR)
                answers[number] = all_of(connection)

        clients = [threading.Thread(target=client, args=(number,)) for number in range(10)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(WAIT_S * 3)
        assert answers == {n: hashlib.sha256(data[n]).hexdigest().encode() for n in range(10)}
    asked = site.asked()
    assert asked.startswith("--jobid 7 --job-name=vhpc-forward --quiet --overlap --mem=0 ")
    assert f"--nodes=1 --ntasks=1 --nodelist=n1 /run/vhpc/vhpc-agent --forward {port} --task 0" in asked


def test_it_works_over_the_channel_of_a_guest(site: StepSite, guest: Guest) -> None:
    site.through(guest)
    data = os.urandom(20 * MIB)
    with server(digest_after_the_end) as port, forwarded(site, f"0:{port}") as it:
        for _ in range(2):
            with it.connect() as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                assert all_of(connection) == hashlib.sha256(data).hexdigest().encode()
        it.process.send_signal(signal.SIGINT)
        assert it.process.wait(WAIT_S) == 130


@pytest.mark.promise("tools.forward", "attack.forward")
def test_a_client_that_does_not_read_delays_no_other(site: StepSite) -> None:
    sent: list[int] = []

    def endless(connection: socket.socket) -> None:
        if connection.recv(1) == b"q":
            return connection.sendall(b"quick")
        with contextlib.suppress(OSError):
            while True:
                sent.append(connection.send(bytes(65536)))

    with server(endless) as port, forwarded(site, f"0:{port}") as it, it.connect() as slow:
        slow.sendall(b"s")
        before = -1
        while before != (before := len(sent)) or not sent:
            time.sleep(0.5)
        # windows of the protocol, and buffers of sockets in the kernel on both sides
        assert sum(sent) < 32 * MIB
        with it.connect() as quick:
            quick.sendall(b"q")
            assert all_of(quick) == b"quick"
        resident = Path(f"/proc/{it.process.pid}/status").read_text()
        assert int(re.findall(r"VmRSS:\s+(\d+)", resident)[0]) < 200 << 10


def test_a_reset_passes_in_both_directions(site: StepSite) -> None:
    def reset(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    with server(reset) as port, forwarded(site, f"0:{port}") as it, it.connect() as client:
        assert ended_by_reset(client)
    seen = threading.Event()

    def waits(connection: socket.socket) -> None:
        if ended_by_reset(connection):
            seen.set()

    with server(waits) as port, forwarded(site, f"0:{port}") as it:
        with it.connect() as connection:
            connection.sendall(b"x")
            time.sleep(0.3)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        assert seen.wait(WAIT_S)


def test_a_port_without_a_server_is_named_once(site: StepSite) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with forwarded(site, f"0:{port}") as it:
        for _ in range(3):
            assert is_refused(it)
        it.process.send_signal(signal.SIGINT)
        said = it.said()
    assert said.splitlines() == [
        f"vhpc: nothing listens on port {port} of the guest of n1 yet; "
        "connections are refused until something does",
        "vhpc: a connection was refused in the guest: nothing listens on the port",
    ]


def test_a_server_on_ipv6_alone_is_reached(site: StepSite) -> None:
    family = socket.AF_INET6
    with (
        server(digest_after_the_end, family) as port,
        forwarded(site, f"0:{port}") as it,
        it.connect() as client,
    ):
        client.shutdown(socket.SHUT_WR)
        assert all_of(client).decode() == hashlib.sha256(b"").hexdigest()


@pytest.mark.promise("tools.forward")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_step_ends_with_the_command(site: StepSite, number: signal.Signals) -> None:
    with server(all_of) as port, forwarded(site, f"0:{port}") as it, it.connect() as connection:
        connection.sendall(b"x")
        pid = site.step()
        it.process.send_signal(number)
        code = it.process.wait(WAIT_S)
        assert gone(pid)
        assert code == (-number if number == signal.SIGKILL else 130)


@pytest.mark.promise("tools.forward")
def test_the_end_of_the_job_is_one_line(site: StepSite) -> None:
    with server(all_of) as port, forwarded(site, f"0:{port}") as it:
        site.says("COMPLETING")
        os.kill(site.step(), signal.SIGKILL)
        assert it.said().splitlines() == ["vhpc: job 7 has ended"]
        assert it.process.returncode == 0


def test_a_socket_admits_only_its_user(site: StepSite) -> None:
    path = site.folder / "jupyter.sock"
    with server(digest_after_the_end) as port, forwarded(site, str(port), "--socket", str(path)) as it:
        assert it.line == f"vhpc: {path} leads to port {port} of the guest of n1, until Ctrl-C\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"abc")
            client.shutdown(socket.SHUT_WR)
            assert all_of(client).decode() == hashlib.sha256(b"abc").hexdigest()
        code, _, said = site.run("forward", "7", str(port), "--socket", str(path))
        assert (code, said) == (
            1,
            f"vhpc: cannot listen on {path}: Address already in use (remove it first)\n",
        )
        it.process.send_signal(signal.SIGINT)
        it.said()
    assert not path.exists()


def test_a_guest_of_several_on_another_node(site: StepSite) -> None:
    with server(digest_after_the_end) as port:
        words = (f"0:{port}", "--node", "n2", "--guest", "2")
        with forwarded(site, *words) as it, it.connect() as connection:
            connection.shutdown(socket.SHUT_WR)
            assert all_of(connection)
            assert "of guest 2 of n2, until" in it.line
    assert site.asked().count("--ntasks=3 --nodelist=n2 --input=2 --output=2 /run/vhpc/vhpc-agent") == 1
    code, _, said = site.run("forward", "7", "80", "--guest", "3")
    assert code == 1
    assert "there is no guest 3 on n1: the job has 3 guests, from 0 to 2 there" in said


def test_a_refused_forward_is_one_line(site: StepSite) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = taken.getsockname()[1]
        cases = {
            ("0",): "'0' is not [LOCAL:]PORT",
            ("1:2:3",): "'1:2:3' is not [LOCAL:]PORT",
            ("70000:80",): "'70000:80' is not [LOCAL:]PORT",
            ("1:2", "--socket", "x"): "--socket and a local port exclude each other (give 2 alone)",
            (f"{used}:80",): f"cannot listen on port {used} of this host: Address already in use",
            ("0:80", "--node", "n3"): "job 7 is not on node n3: its nodes are n[1-2]",
        }
        for words, expected in cases.items():
            code, _, said = site.run("forward", "7", *words)
            assert (code, len(said.splitlines())) == (1, 1), said
            assert expected in said
    assert not (site.folder / "asked").exists()


def test_jobs_that_have_no_guest_for_the_user(site: StepSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.job("JobState=PENDING NodeList=(null)")
    assert "job 7 does not run: its state is PENDING" in site.run("forward", "7", "0:80")[2]
    site.job("JobState=RUNNING NodeList=n1 AdminComment=x")
    assert "job 7 has no guests: its AdminComment names no image" in site.run("forward", "7", "0:80")[2]
    site.script("scontrol", "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    assert "job 7 is unknown" in site.run("forward", "7", "0:80")[2]


@pytest.mark.promise("attack.forward")
@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (
            "echo \"vhpc-agent: unrecognized option '--forward'\" >&2; exit 2",
            "the image of the job cannot forward ports: its agent is older than this command "
            "(build or import the image again)",
        ),
        (
            "echo 'srun: error: n1: task 0: Exited' >&2; echo 'vhpc-run: the guest has ended' >&2; exit 125",
            "the step in job 7 failed: vhpc-run: the guest has ended",
        ),
        ("head -c 100000 /dev/zero; sleep 60", "the guest of n1 violates the protocol: a malformed frame"),
        ("yes text; sleep 60", "violates the protocol: text before the first frame"),
        (
            "printf '\\2\\0\\0\\0\\1\\0\\0\\0\\n'; sleep 60",
            "violates the protocol: a frame before the first one",
        ),
    ],
)
def test_a_step_that_fails_is_one_line(site: StepSite, before: str, expected: str) -> None:
    site.before(before)
    code, _, said = site.run("forward", "7", "0:80")
    assert (code, len(said.splitlines())) == (1, 1), said
    assert expected in said


@pytest.mark.promise("tools.forward")
def test_text_of_a_task_prolog_is_no_frame(site: StepSite) -> None:
    site.before("printf 'said\\tby\\n\\n\\303\\244 site\\r\\n'")
    with server(digest_after_the_end) as port, forwarded(site, f"0:{port}") as it, it.connect() as client:
        client.shutdown(socket.SHUT_WR)
        assert all_of(client) == hashlib.sha256(b"").hexdigest().encode()


@pytest.mark.promise("tools.forward")
def test_only_named_hosts_connect_from_elsewhere(site: StepSite) -> None:
    def reached(it: Forwarded, source: str) -> bool:
        found = re.search(r"127\.0\.0\.2:(\d+) leads to", it.line)
        assert found is not None, it.line
        try:
            with socket.create_connection(("127.0.0.2", int(found[1])), WAIT_S, (source, 0)) as client:
                client.shutdown(socket.SHUT_WR)
                return all_of(client) == hashlib.sha256(b"").hexdigest().encode()
        except ConnectionResetError:
            return False

    with server(digest_after_the_end) as port:
        with forwarded(site, f"0:{port}", "--listen", "127.0.0.2", "--from", "127.0.0.3") as it:
            assert "only 127.0.0.3 can connect to it" in it.line
            assert (reached(it, "127.0.0.1"), reached(it, "127.0.0.3")) == (False, True)
        with forwarded(site, f"0:{port}", "--listen", "127.0.0.2") as it:
            assert reached(it, "127.0.0.1")
    for words in (["--listen", "node7"], ["--from", "login"], ["--socket", "x", "--listen", "127.0.0.1"]):
        with forwarded(site, "80", *words) as it:
            assert it.process.wait(WAIT_S) == 1
            assert it.line.startswith("vhpc: --")
