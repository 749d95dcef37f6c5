# SPDX-License-Identifier: Apache-2.0
"""Frames and fields of the guest channel (docs/guest-protocol.md), on a connected socket."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple, NoReturn

from vhpc_slurm.errors import VhpcError
from vhpc_slurm.terminal import printable

PAYLOAD_MAX = 262144
MESSAGE_MAX = 8 << 20

HEADER = struct.Struct("<IBBHII")
"""Header of a frame: length of its payload, type, fd, flags, session, call."""
MORE = 1
"""Flag: the message continues in the next frame."""

_TLV = struct.Struct("<HHI")
_ERRNO_MAX = 4096


class ChannelError(VhpcError):
    """The guest does not answer, has ended, or has violated the protocol."""

    kind = "guest"


class ChannelSilentError(ChannelError):
    """No answer before the deadline; a caller that waits for HELLO may call again."""


class ChannelRefusedError(ChannelError):
    """The agent has answered that it cannot or will not do this.

    Attributes:
        errno: a Linux errno as the guest sent it; a guest can send any number.
    """

    def __init__(self, what: str, errno: int, why: str = "") -> None:
        super().__init__(what, why or (os.strerror(errno) if errno < _ERRNO_MAX else f"error {errno}"))
        self.errno = errno


# The numbers are those of guest/lib/protocol.h; tests/unit/rules/test_shared_constants.py compares them.


class FrameType(IntEnum):
    """Frame types.  A control client sends and receives HELLO, REQUEST, REPLY, ERROR, PING and PONG."""

    HELLO = 1
    REQUEST = 2
    REPLY = 3
    EXEC = 4
    STARTED = 5
    DATA = 6
    EOF = 7
    CREDIT = 8
    SIGNAL = 9
    WINSIZE = 10
    EXIT = 11
    ERROR = 12
    CLOSE = 13
    PING = 14
    PONG = 15
    SHARE = 16
    SHARED = 17
    SYNC = 18


class Op(IntEnum):
    """Control operations."""

    IDENTITY = 1
    MOUNT = 2
    READY = 3
    POWEROFF = 4
    INFO = 5
    FABRIC = 6
    TOPOLOGY = 7
    NETWORK = 8
    REACH = 9
    SSH = 10
    NAT = 16
    USAGE = 24
    DISK = 32
    BIND = 33
    ENVIRONMENT = 34
    HOLD = 35
    RELEASE = 36
    RESUME = 37
    PREPARE = 38
    CLUSTER = 39


class GuestState(IntEnum):
    """``Tag.STATE`` of a HELLO from the shim."""

    BOOTING = 0
    UP = 1


class Tag(IntEnum):
    """Tags of fields."""

    VERSION_MIN = 1
    VERSION_MAX = 2
    AGENT_VERSION = 3
    BOOT_ID = 4
    KERNEL = 5
    STATE = 6
    SHARES = 7
    FDS = 16
    UID = 17
    GID = 18
    GROUPS = 19
    ARG = 20
    ENV = 21
    CWD = 22
    UMASK = 23
    RLIMIT = 24
    NICE = 25
    TTY = 26
    TERMIOS = 27
    SCRIPT_PATH = 28
    SCRIPT_DATA = 29
    JOINED = 30
    TTY_OUT = 31
    PID = 32
    EXIT_CODE = 33
    EXIT_SIGNAL = 34
    CORE = 35
    ERRNO = 36
    TEXT = 37
    KIND = 38
    OP = 48
    REQUEST_ID = 49
    HOSTNAME = 50
    HOSTS_LINE = 51
    USER_NAME = 52
    USER_UID = 53
    USER_GID = 54
    USER_GECOS = 55
    USER_HOME = 56
    USER_SHELL = 57
    GROUP = 58
    TIMEZONE = 59
    COMMAND = 60
    MOUNT_TAG = 61
    MOUNT_PATH = 62
    READ_ONLY = 63
    UPTIME_MS = 64
    CPUS = 65
    MEMORY_KIB = 66
    SESSIONS = 67
    KEY = 68
    PORT_GUID = 69
    WAIT_MS = 70
    PORT = 71
    ADDRESS = 72
    INTERFACE = 73
    TOPOLOGY = 74
    PMI_REFUSAL = 75
    SIGNAL_GROUP = 76
    MAC = 77
    MTU = 78
    IPV4 = 79
    IPV6 = 80
    NODELIST = 81
    TARGET = 82
    HOST = 83
    HOST_KEY = 84
    HOST_PUBLIC = 85
    USER_KEY = 86
    USER_PUBLIC = 87
    ZONE_DATA = 88
    MOUNT_SOURCE = 89
    PMI_NETWORK = 96
    PMIX = 97
    DISPLAY = 98
    OPERAND = 90
    AFFINITY = 91
    GATEWAY = 112
    NAMESERVER = 113
    USAGE = 128
    STEP = 129
    TASKS = 130
    CPU_US = 131
    USER_US = 132
    SYSTEM_US = 133
    PEAK_BYTES = 134
    RSS_BYTES = 135
    READ_BYTES = 136
    WRITTEN_BYTES = 137
    OOM_KILLS = 138
    GPU = 139
    GPU_ADDRESS = 140
    BUSY_E4 = 141
    MEMORY_BYTES = 142
    POWER_MW = 143
    GPU_MISSING = 144
    LOCKS = 145
    EMULATED = 146
    ATTACH = 147
    TIME_NS = 148
    HOLD = 149
    PMI_TOLD = 150
    CLUSTER = 151
    GUEST = 152
    JOB = 153
    MEMBER_HOST_KEY = 154
    MEMBER_USER_KEY = 155


def put(tag: Tag, value: int | str | bytes) -> bytes:
    """One encoded field; integers are 32 bits wide."""
    if isinstance(value, int):
        data = struct.pack("<I", value)
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogateescape")
    else:
        data = value
    return _TLV.pack(tag, 0, len(data)) + data


def fields_of(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """Decode (tag, value) pairs; ChannelError when they are malformed."""
    at = 0
    while at < len(payload):
        if len(payload) - at < _TLV.size:
            raise ChannelError("the guest sent a malformed message", "truncated field")
        tag, zero, length = _TLV.unpack_from(payload, at)
        at += _TLV.size
        if zero != 0 or length > len(payload) - at:
            raise ChannelError("the guest sent a malformed message", "a field passes the end")
        yield tag, payload[at : at + length]
        at += length


def number(fields: dict[int, bytes], tag: Tag) -> int:
    """An unsigned integer, 0 when it is absent; ChannelError when it is of another size."""
    data = fields.get(tag, b"")
    if len(data) not in (0, 4, 8):
        raise ChannelError("the guest sent a malformed message", f"{tag.name} is not a number")
    return int.from_bytes(data, "little")


def text(fields: dict[int, bytes], tag: Tag) -> str:
    """A text of the guest, which can be anything, as one printable line."""
    return guest_text(fields.get(tag, b""))


def guest_text(raw: bytes) -> str:
    """Bytes of a guest as one printable line of bounded length."""
    return printable(raw.decode("utf-8", "replace"))[:1000]


class Frame(NamedTuple):
    """One frame, without the number of its session."""

    kind: int
    fd: int
    flags: int
    call: int
    payload: bytes


class FrameStream:
    """Whole messages in and out, each with a deadline on ``time.monotonic()``'s clock."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._sock.close()

    def send(self, kind: FrameType, message: bytes, deadline: float, *, fd: int = 0, call: int = 0) -> None:
        """Send one message, in several frames if need be; ChannelError when that fails."""
        frames = bytearray()
        parts = [message[at : at + PAYLOAD_MAX] for at in range(0, len(message), PAYLOAD_MAX)] or [b""]
        for i, part in enumerate(parts):
            flags = MORE if i + 1 < len(parts) else 0
            frames += HEADER.pack(len(part), kind, fd, flags, 0, call) + part
        self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            self._sock.sendall(frames)
        except TimeoutError as err:
            raise ChannelError("the guest's channel is stuck") from err
        except OSError as err:
            self._raise_reason(deadline, err)

    def _raise_reason(self, deadline: float, cause: OSError) -> NoReturn:
        """The peer closed the connection while we wrote: it may have sent an ERROR with the reason."""
        try:
            while True:
                frame = self.frame(deadline, "the guest's channel is stuck")
                self._check_error(frame.kind, frame.payload)
        except ChannelError as err:
            raise err from cause

    def receive(self, wanted: FrameType, deadline: float, silence: str) -> bytes:
        """Next message of a type; ``silence`` is the error's text when none comes in time."""
        message = bytearray()
        while True:
            kind, _, flags, _, payload = self.frame(deadline, silence)
            self._check_error(kind, payload)
            if kind == FrameType.HELLO and wanted != FrameType.HELLO:
                continue
            if kind in (FrameType.REPLY, FrameType.PONG) and kind != wanted:
                continue  # belongs to a call whose deadline has passed
            if kind != wanted:
                raise ChannelError("the guest's channel broke the protocol", f"frame of type {kind}")
            message += payload
            if len(message) > MESSAGE_MAX:
                raise ChannelError("the guest sent too long a message")
            if not flags & MORE:
                return bytes(message)

    @staticmethod
    def _check_error(kind: int, payload: bytes) -> None:
        if kind != FrameType.ERROR:
            return
        fields = dict(fields_of(payload))
        raise ChannelError("the guest's channel was closed", text(fields, Tag.TEXT))

    def frame(self, deadline: float, silence: str) -> Frame:
        """Next frame of any type; errors as of ``receive``."""
        self._fill(HEADER.size, deadline, silence)
        length, kind, fd, flags, _, call = HEADER.unpack_from(self._buffer)
        if length > PAYLOAD_MAX:
            raise ChannelError("the guest's channel broke the protocol", f"frame of {length} bytes")
        self._fill(HEADER.size + length, deadline, silence)
        payload = bytes(self._buffer[HEADER.size : HEADER.size + length])
        del self._buffer[: HEADER.size + length]
        return Frame(kind, fd, flags, call, payload)

    def _fill(self, need: int, deadline: float, silence: str) -> None:
        while len(self._buffer) < need:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChannelSilentError(silence, "deadline passed")
            self._sock.settimeout(left)
            try:
                data = self._sock.recv(65536)
            except TimeoutError as err:
                raise ChannelSilentError(silence, "deadline passed") from err
            except OSError as err:
                raise ChannelError("the guest's channel is closed", str(err)) from err
            if not data:
                raise ChannelError("the guest's channel is closed", "end of file")
            self._buffer += data
