# SPDX-License-Identifier: Apache-2.0
"""Root of a guest who speaks on the channel in place of the agent, towards a real vhpc-shim and vhpc-run."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, NamedTuple

from vhpc_slurm.node.guest import wire

if TYPE_CHECKING:
    from guest_rig import Guest

WAIT_S = 60


class Frame(NamedTuple):
    """A frame from the host."""

    kind: int
    fd: int
    call: int
    payload: bytes


IN, OUT, BOTH = 1, 2, 3
"""Directions of a descriptor (docs/guest-protocol.md)."""


class HostileGuest:
    """Says what it likes; ``guest`` has no agent."""

    def __init__(self, guest: Guest) -> None:
        self.socket = guest.agent_end
        self.socket.settimeout(WAIT_S)
        self._buffer = bytearray()
        versions = wire.put(wire.Tag.VERSION_MIN, 1) + wire.put(wire.Tag.VERSION_MAX, 1)
        self.send(frame(wire.FrameType.HELLO, versions, session=0))

    def send(self, frames: bytes) -> None:
        """Send frames, whether they are allowed or not."""
        self.socket.sendall(frames)

    def begin(self) -> None:
        """Wait for the program of a vhpc-run, and say that it runs."""
        while self.hear().kind != wire.FrameType.EXEC:
            pass
        self.send(
            frame(wire.FrameType.STARTED, wire.put(wire.Tag.PID, 1) + wire.put(wire.Tag.PMI_REFUSAL, b""))
        )

    def hear(self) -> Frame:
        """The next frame of the host; TimeoutError, or EOFError when the channel is closed."""
        while len(self._buffer) < wire.HEADER.size or len(self._buffer) < wire.HEADER.size + self._length():
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._buffer += data
        length, kind, fd, _, _, call = wire.HEADER.unpack_from(self._buffer)
        payload = bytes(self._buffer[wire.HEADER.size : wire.HEADER.size + length])
        del self._buffer[: wire.HEADER.size + length]
        return Frame(kind, fd, call, payload)

    def _length(self) -> int:
        return int.from_bytes(self._buffer[:4], "little")


def frame(
    kind: int, body: bytes = b"", *, session: int = 1, call: int = 0, fd: int = 0, flags: int = 0
) -> bytes:
    """One frame."""
    return struct.pack("<IBBHII", len(body), kind, fd, flags, session, call) + body


def command(*argv: str, fds: bytes = bytes((0, IN, 1, OUT, 2, OUT)), **env: str) -> bytes:
    """The body of EXEC for a command on the host."""
    body = wire.put(wire.Tag.FDS, fds)
    body += wire.put(wire.Tag.UID, os.getuid()) + wire.put(wire.Tag.GID, os.getgid())
    body += b"".join(wire.put(wire.Tag.ARG, word.encode()) for word in argv)
    body += b"".join(wire.put(wire.Tag.ENV, f"{name}={value}".encode()) for name, value in env.items())
    return body + wire.put(wire.Tag.CWD, b"/")
