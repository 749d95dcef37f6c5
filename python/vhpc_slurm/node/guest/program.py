# SPDX-License-Identifier: Apache-2.0
"""Runs a program in a guest as root, and keeps the end of its output.

It is the EXEC of docs/guest-protocol.md, as vhpc-run sends it for tasks; here root's hooks are the initiator.
The agent ends the program and its children when this channel is closed.
"""

from __future__ import annotations

import errno
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vhpc_slurm.node.guest.channel import ChannelError, ChannelSilentError, GuestChannel
from vhpc_slurm.node.guest.wire import (
    HEADER,
    MORE,
    Frame,
    FrameType,
    Tag,
    fields_of,
    guest_text,
    number,
    put,
    text,
)

OUTPUT_MAX = 4096
"""Bytes of output that are kept, counted from its end; the rest is discarded."""
OUT, DIRECTION_OUT = 1, 2
STOP_S = 0.5
"""A program whose caller stops it is ended within this time."""
EXEC_FAILED, REFUSED = 1, 2
"""KIND of an ERROR."""


class ProgramEnd(NamedTuple):
    """How a program has ended.

    Attributes:
        code: its exit code; None if a signal has ended it, or it was not over in time.
        signal: the signal that has ended it; None if none has.
        oom_killed: the guest's kernel has killed one of its processes for memory.
        output: the last bytes that it has written, standard output and standard error together.
    """

    code: int | None
    signal: int | None
    oom_killed: bool
    output: bytes

    @property
    def timed_out(self) -> bool:
        """Whether it was not over in time."""
        return self.code is None and self.signal is None

    def last_lines(self, count: int) -> str:
        """The last lines that are not empty, as one printable line."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return guest_text(b" | ".join(lines[-count:]))


class NotStartedError(ChannelError):
    """The guest could not start the program.

    Attributes:
        errno: of execve(2) in the guest, or of a step before it; a guest can send any number.
    """

    def __init__(self, what: str, number: int, why: str) -> None:
        super().__init__(what, why)
        self.errno = number


class ProgramChannel(GuestChannel):
    """A connection to a guest's agent that runs one program."""

    def run(
        self, argv: Sequence[str], env: Mapping[str, str], timeout_s: float, stop: threading.Event
    ) -> ProgramEnd:
        """Run a program as root in /, without input, until it ends, the time is over, or ``stop`` is set.

        Raises:
            NotStartedError: the guest could not start it.
            ChannelError: the guest has ended, or has violated the protocol.
        """
        output = bytearray()
        deadline = self._greet(timeout_s)
        self._stream.send(FrameType.EXEC, _exec(argv, env), deadline)
        while not stop.is_set() and time.monotonic() < deadline:
            try:
                frame = self._stream.frame(min(deadline, time.monotonic() + STOP_S), "")
            except ChannelSilentError:
                continue
            if frame.call != 0:
                self._refuse_call(frame, deadline)
            elif (end := self._act(frame, argv[0], output, deadline)) is not None:
                return end
        return ProgramEnd(None, None, oom_killed=False, output=bytes(output))

    def _act(self, frame: Frame, program: str, output: bytearray, deadline: float) -> ProgramEnd | None:
        """Take one frame of the program; its end, if this is the last one."""
        if frame.kind == FrameType.DATA:
            output += frame.payload
            del output[:-OUTPUT_MAX]
            credit = struct.pack("<I", len(frame.payload) + HEADER.size)
            self._stream.send(FrameType.CREDIT, credit, deadline, fd=frame.fd)
        elif frame.kind == FrameType.ERROR:
            said = dict(fields_of(frame.payload))
            what, why = f"{program} did not start", text(said, Tag.TEXT)
            if number(said, Tag.KIND) == EXEC_FAILED:
                raise NotStartedError(what, number(said, Tag.ERRNO), why)
            raise ChannelError(what, why)
        elif frame.kind == FrameType.EXIT:
            said = dict(fields_of(frame.payload))
            signal = number(said, Tag.EXIT_SIGNAL) if Tag.EXIT_SIGNAL in said else None
            code = None if signal is not None else number(said, Tag.EXIT_CODE)
            return ProgramEnd(code, signal, number(said, Tag.OOM_KILLS) > 0, bytes(output))
        return None

    def _refuse_call(self, frame: Frame, deadline: float) -> None:
        """A command of Slurm in the guest, such as srun: no step can start before its job does."""
        if frame.kind == FrameType.EXEC and not frame.flags & MORE:
            body = put(Tag.KIND, REFUSED) + put(Tag.ERRNO, errno.EPERM)
            body += put(Tag.TEXT, "a check of the guest cannot run commands of Slurm")
            self._stream.send(FrameType.ERROR, body, deadline, call=frame.call)


def _exec(argv: Sequence[str], env: Mapping[str, str]) -> bytes:
    fds = bytes((OUT, DIRECTION_OUT, OUT + 1, DIRECTION_OUT))
    body = [put(Tag.FDS, fds), put(Tag.UID, 0), put(Tag.GID, 0), put(Tag.JOINED, 1), put(Tag.CWD, "/")]
    body += [put(Tag.ARG, word) for word in argv]
    body += [put(Tag.ENV, f"{name}={value}") for name, value in env.items()]
    return b"".join(body)
