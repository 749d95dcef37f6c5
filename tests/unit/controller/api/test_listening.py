# SPDX-License-Identifier: Apache-2.0
"""Which queue a connection waits in, how fast the rest is accepted, and who is at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from controller_lab import NOBODY, as_uid, bind_from, free_port, wait_for

from vhpc_slurm import rootport
from vhpc_slurm.controller.api import listening
from vhpc_slurm.controller.api.listening import Lane, Listener
from vhpc_slurm.controller.api.peeruid import PeerUids
from vhpc_slurm.errors import FabricError

root = pytest.mark.skipif(os.geteuid() != 0, reason="uses privileged ports and other users: run as root")


def from_port(source: str, target: tuple[str, int], port: int = 0, options: bytes = b"") -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in target[0] else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if options:
        made.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, options)
    bind_from(made, source, port)
    made.settimeout(10)
    made.connect(target)
    return made


@pytest.mark.promise("attack.flood")
@root
@pytest.mark.parametrize(
    ("host", "source", "target", "port", "options", "lane"),
    [
        ("0.0.0.0", "127.0.0.2", "127.0.0.1", 801, b"", Lane.PRIVILEGED),
        ("0.0.0.0", "127.0.0.1", "127.0.0.1", 1023, b"", Lane.PRIVILEGED),
        ("0.0.0.0", "127.0.0.1", "127.0.0.1", 0, b"", Lane.OWN_HOST),
        ("0.0.0.0", "127.0.0.3", "127.0.0.3", 0, b"", Lane.OWN_HOST),
        ("0.0.0.0", "127.0.0.2", "127.0.0.1", 0, b"", Lane.REST),
        # the word behind the header could be anything then
        ("0.0.0.0", "127.0.0.2", "127.0.0.1", 802, b"\x01\x01\x01\x00", Lane.REST),
        ("127.0.0.1", "127.0.0.2", "127.0.0.1", 803, b"", Lane.PRIVILEGED),
        ("::", "127.0.0.2", "127.0.0.1", 804, b"", Lane.PRIVILEGED),
        ("::", "127.0.0.1", "127.0.0.1", 0, b"", Lane.OWN_HOST),
        ("::", "127.0.0.2", "127.0.0.1", 0, b"", Lane.REST),
        ("::", "::1", "::1", 805, b"", Lane.PRIVILEGED),
        ("::", "::1", "::1", 0, b"", Lane.OWN_HOST),
    ],
)
def test_a_connection_waits_in_the_queue_of_its_lane(
    host: str, source: str, target: str, port: int, options: bytes, lane: Lane
) -> None:
    at = free_port()
    with ExitStack() as stack:
        sockets = listening._bound(host, at)
        for one in sockets.values():
            stack.enter_context(closing(one))
            one.listen(8)
        listening._steer(sockets[Lane.PRIVILEGED])
        for number in range(5):
            own = port and port - 20 * number
            stack.enter_context(closing(from_port(source, (target, at), own, options)))
        waiting: dict[Lane, int] = {}

        def all_there() -> bool:
            for number, one in sockets.items():
                with contextlib.suppress(BlockingIOError):
                    while True:
                        stack.enter_context(closing(one.accept()[0]))
                        waiting[number] = waiting.get(number, 0) + 1
            return sum(waiting.values()) >= 5

        wait_for(all_there, "not all connections arrive")
        assert waiting == {lane: 5}


@pytest.fixture
def port() -> int:
    return free_port()


def test_accepted_connections_are_passed_with_their_place(port: int) -> None:
    async def accept() -> list[tuple[str, int]]:
        places: list[tuple[str, int]] = []

        def accepted(connection: socket.socket, place: tuple[str, int]) -> None:
            connection.close()
            places.append(place)

        listener = Listener("127.0.0.1", port, accepted)
        listener.start()
        try:
            with (
                from_port("127.0.0.1", ("127.0.0.1", port)) as one,
                from_port("127.0.0.2", ("127.0.0.1", port)) as two,
            ):
                wanted = [one.getsockname(), two.getsockname()]
                while len(places) < 2:
                    await asyncio.sleep(0.01)
        finally:
            listener.close()
        assert sorted(places) == sorted(wanted)
        return places

    assert len(asyncio.run(accept())) == 2


def test_only_other_hosts_have_a_limited_rate(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "RATE", 20.0)
    monkeypatch.setattr(listening, "BURST", 10.0)
    counts = {"127.0.0.1": 0, "127.0.0.2": 0}

    def accepted(connection: socket.socket, place: tuple[str, int]) -> None:
        counts[place[0]] += 1
        connection.close()

    async def accept() -> None:
        listener = Listener("127.0.0.1", port, accepted)
        listener.start()
        try:
            with ExitStack() as stack:
                for number in range(80):
                    source = "127.0.0.2" if number % 2 else "127.0.0.1"
                    stack.enter_context(closing(from_port(source, ("127.0.0.1", port))))
                began = time.monotonic()
                while counts["127.0.0.1"] < 40:
                    await asyncio.sleep(0.01)
                assert counts["127.0.0.2"] < 40, "these wait"
                while counts["127.0.0.2"] < 40:
                    await asyncio.sleep(0.01)
                # 10 at once, the others at 20 a second: never sooner, whatever the machine is busy with
                assert time.monotonic() - began > 1.0
        finally:
            listener.close()

    asyncio.run(accept())


def test_a_kernel_without_the_filter_has_one_queue_for_all(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: socket.socket) -> None:
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    monkeypatch.setattr(listening, "_steer", refuse)
    found: list[tuple[str, int]] = []

    def accepted(connection: socket.socket, place: tuple[str, int]) -> None:
        connection.close()
        found.append(place)

    async def accept() -> None:
        listener = Listener("127.0.0.1", port, accepted)
        listener.start()
        try:
            with ExitStack() as stack:
                for source in ("127.0.0.1", "127.0.0.2") * 5:
                    stack.enter_context(closing(from_port(source, ("127.0.0.1", port))))
                while len(found) < 10:
                    await asyncio.sleep(0.01)
        finally:
            listener.close()

    asyncio.run(asyncio.wait_for(accept(), 20))
    assert "all connections share one accept queue" in caplog.text


def test_a_port_is_not_shared_with_another_vhpcd(port: int) -> None:
    async def both() -> None:
        first = Listener("127.0.0.1", port, lambda *_: None)
        first.start()
        try:
            with pytest.raises(FabricError, match="check whether another vhpcd is running"):
                Listener("127.0.0.1", port, lambda *_: None)
        finally:
            first.close()
        Listener("127.0.0.1", port, lambda *_: None).close()

    asyncio.run(both())


# --- who is at the other end ------------------------------------------------------------------------


@pytest.fixture
def uids() -> Iterator[PeerUids]:
    with closing(PeerUids()) as found:
        yield found


def connected(host: str = "127.0.0.1") -> tuple[socket.socket, socket.socket, socket.socket]:
    server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    client = socket.create_connection(server.getsockname()[:2])
    accepted, _ = server.accept()
    return server, client, accepted


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_user_of_the_other_end_is_known_on_one_host(uids: PeerUids, host: str) -> None:
    for one in (parts := connected(host)):
        one.settimeout(5)
    _, _, accepted = parts
    assert uids.of(accepted.getpeername()[:2], accepted.getsockname()[:2]) == os.geteuid()


@root
def test_the_end_of_another_user_has_that_users_uid(uids: PeerUids) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def own_place() -> list[Any]:
            client = socket.create_connection(server.getsockname())
            accepted, place = server.accept()
            with client, accepted:
                return [uids.of(place, accepted.getsockname())]

        assert as_uid(NOBODY, own_place)[0] == NOBODY


def test_a_closed_end_has_no_user(uids: PeerUids) -> None:
    _, client, accepted = connected()
    peer, own = accepted.getpeername(), accepted.getsockname()
    client.close()
    assert uids.of(peer, own) is None
    assert uids.of(("127.0.0.1", 1), own) is None
    assert uids.of(("nonsense", 1), own) is None
    _, client, accepted = connected()
    assert uids.of(accepted.getpeername(), accepted.getsockname()) == os.geteuid(), "and it answers as before"


@root
def test_root_connects_from_an_unused_privileged_port(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        seen = set()
        for _ in range(20):
            with rootport.connect("127.0.0.1", port, time.monotonic() + 5) as link:
                seen.add(link.getsockname()[1])
                accepted, _ = server.accept()
                accepted.close()  # first, so that the port can be used again
                rootport.wait_for_end(link, 1.0)
        assert all(rootport.FIRST <= one <= rootport.LAST for one in seen)
        assert not seen & rootport.SERVICES


@root
def test_where_all_privileged_ports_are_taken_any_will_do(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootport, "FIRST", 1020)
    with socket.create_server(("127.0.0.1", port)), ExitStack() as stack:
        for one in range(1020, 1024):
            taken = stack.enter_context(socket.socket())
            taken.bind(("", one))
        monkeypatch.setattr(rootport, "TRIES", 4)
        with rootport.connect("127.0.0.1", port, time.monotonic() + 5) as link:
            assert link.getsockname()[1] >= 1024


@root
def test_another_user_connects_from_any_port(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):

        def own_port() -> int:
            with rootport.connect("127.0.0.1", port, time.monotonic() + 5) as link:
                return int(link.getsockname()[1])

        assert as_uid(NOBODY, own_port) >= 1024


def test_a_failed_listener_reports_its_reason(port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        rootport.connect("127.0.0.1", port, time.monotonic() + 5)
    with pytest.raises(TimeoutError):
        rootport.connect("127.0.0.1", port, time.monotonic() - 1)
