# SPDX-License-Identifier: Apache-2.0
"""Frames between `vhpc forward` and `vhpc-agent --forward` (docs/guest-protocol.md, guest/forward/wire.h)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

HELLO, OPEN, OPENED, DATA, EOF, CREDIT, CLOSE = range(1, 8)
VERSION = 1
WINDOW = 131072
"""Bytes that one side sends on a channel without a CREDIT."""
DATA_MAX = 16384
CHANNELS = 128
"""Connections at a time."""
LISTENING = 1
"""Flag of HELLO: a program of the guest listens on the port."""
TEXT_MAX = 65536
"""Bytes of text before the first frame."""
_HEADER = struct.Struct("<BBHI")
_LENGTHS = {HELLO: 4, OPEN: 0, OPENED: 0, EOF: 0, CREDIT: 4, CLOSE: 4}


class ForwardError(Exception):
    """The guest has sent what the protocol does not permit."""


@dataclass(frozen=True)
class Frame:
    """One frame; ``number`` is the value of CREDIT and CLOSE, and version and flags of HELLO."""

    kind: int
    channel: int
    payload: bytes = b""

    @property
    def number(self) -> int:
        """The payload as a number."""
        return int.from_bytes(self.payload, "little")


def pack(kind: int, channel: int, payload: bytes | int = b"") -> bytes:
    """Bytes of a frame; a number becomes four bytes."""
    data = payload.to_bytes(4, "little") if isinstance(payload, int) else payload
    return _HEADER.pack(kind, 0, len(data), channel) + data + b"\n"


class Decoder:
    """Frames of a stream of bytes; keeps at most one incomplete frame.

    Lines of text before the first frame are skipped: a TaskProlog of the site may print them.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._begun = False
        self._skipped = 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete with these bytes; ForwardError for one that is malformed."""
        self._rest += data
        self._skip_text()
        while len(self._rest) >= _HEADER.size:
            kind, zero, length, channel = _HEADER.unpack_from(self._rest)
            if zero or kind not in range(HELLO, CLOSE + 1) or (channel == 0) != (kind == HELLO):
                raise ForwardError("a malformed frame")
            if not 0 < length <= DATA_MAX if kind == DATA else length != _LENGTHS[kind]:
                raise ForwardError("a frame of a wrong length")
            end = _HEADER.size + length
            if len(self._rest) <= end:
                return
            if self._rest[end] != ord("\n"):
                raise ForwardError("a frame without its end")
            frame = Frame(kind, channel, bytes(self._rest[_HEADER.size : end]))
            del self._rest[: end + 1]
            yield frame

    def _skip_text(self) -> None:
        while not self._begun and self._rest:
            line, end, rest = self._rest.partition(b"\n")
            if not all(byte >= ord(" ") or byte in b"\t\r" for byte in line):
                self._begun = True
            elif self._skipped > TEXT_MAX:
                raise ForwardError("text before the first frame")
            elif end:
                self._skipped += len(line) + 1
                self._rest = rest
            else:
                return
