# SPDX-License-Identifier: Apache-2.0
"""One connection of vhpcd: it waits for an answer as long as its peer does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from vhpc_slurm.controller.api.connection import CHUNK, Connection


class Answer:
    """An answer that comes when it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.given_up = False

    async def text(self) -> str:
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.given_up = True
            raise
        return "answer"


def on_a_connection(test: Any) -> None:
    """Run a test with a connection, the peer's end of it, and an answer."""

    async def run() -> None:
        own, peer = socket.socketpair()
        with own, peer:
            own.setblocking(False)
            await asyncio.wait_for(test(Connection(own), peer, Answer()), 60)

    asyncio.run(run())


def begun(waiting: Coroutine[Any, Any, str | None]) -> asyncio.Task[str | None]:
    return asyncio.get_running_loop().create_task(waiting)


def test_a_silent_peer_gets_its_answer() -> None:
    async def test(connection: Connection, _: socket.socket, answer: Answer) -> None:
        waiting = begun(connection.unless_gone(answer.text()))
        await asyncio.sleep(0)
        answer.may.set()
        assert await waiting == "answer"

    on_a_connection(test)


@pytest.mark.parametrize("how", ["closes", "ends what it sends", "says more"])
def test_an_answer_is_given_up_when_its_peer(how: str) -> None:
    async def test(connection: Connection, peer: socket.socket, answer: Answer) -> None:
        waiting = begun(connection.unless_gone(answer.text()))
        await asyncio.sleep(0)
        match how:
            case "closes":
                peer.close()
            case "ends what it sends":
                peer.shutdown(socket.SHUT_WR)
            case "says more":
                peer.sendall(b"x")
        assert await waiting is None
        assert answer.given_up
        assert not waiting.cancelling()

    on_a_connection(test)


def test_one_that_is_cancelled_ends_though_its_peer_goes_too() -> None:
    async def test(connection: Connection, peer: socket.socket, answer: Answer) -> None:
        waiting = begun(connection.unless_gone(answer.text()))
        await asyncio.sleep(0)
        peer.close()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert answer.given_up

    on_a_connection(test)


def test_a_peer_that_closes_after_its_answer_is_harmless() -> None:
    async def test(connection: Connection, peer: socket.socket, answer: Answer) -> None:
        async def whole() -> str | None:
            found = await connection.unless_gone(answer.text())
            peer.close()
            for _ in range(10):
                await asyncio.sleep(0)
            return found

        answer.may.set()
        assert await begun(whole()) == "answer"

    on_a_connection(test)


def test_a_long_answer_arrives_whole_at_a_slow_peer() -> None:
    async def test(connection: Connection, peer: socket.socket, _: Answer) -> None:
        data = bytes(range(256)) * 8192  # more than the kernel keeps
        sending = asyncio.get_running_loop().create_task(connection.send(data))
        await asyncio.sleep(0)
        assert not sending.done()
        peer.setblocking(False)
        loop, got = asyncio.get_running_loop(), b""
        while len(got) < len(data):
            got += await loop.sock_recv(peer, CHUNK)
        await sending
        assert got == data

    on_a_connection(test)


def test_requests_are_received_in_bounded_pieces() -> None:
    async def test(connection: Connection, peer: socket.socket, _: Answer) -> None:
        peer.sendall(b"abcdef")
        assert await connection.receive(4) == b"abcd"
        assert await connection.receive(1 << 30) == b"ef"
        peer.close()
        with pytest.raises(EOFError):
            await connection.receive(1)

    on_a_connection(test)
