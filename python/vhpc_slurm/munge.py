# SPDX-License-Identifier: Apache-2.0
"""MUNGE credentials through libmunge.

A credential proves to its reader the uid and gid of its sender, on any host with
the same key, within a time to live.  Sources: munge(7), munge.h of libmunge2.

munged detects that a credential is decoded twice *on one host* only; a protocol
that must detect all replays also needs a nonce in the payload.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache

from vhpc_slurm.errors import FabricError
from vhpc_slurm.record import Record

MAX_PAYLOAD = (1 << 20) - 4096
"""Largest payload in bytes: munged accepts requests of at most 1 MiB including their framing."""

_OPT_ZIP, _OPT_TTL, _OPT_SOCKET, _OPT_UID_RESTRICTION = 2, 4, 8, 9
_ZIP_ZLIB = 3


class MungeError(FabricError):
    """An error of libmunge or munged that is not caused by the credential."""


class MungeMissingError(MungeError):
    """No munged answers on the socket, or libmunge is not installed."""


class MungeBusyError(MungeError):
    """munged runs and did not answer in time: other processes keep it busy."""


class CredentialError(MungeError):
    """The credential was refused.

    Attributes:
        credential: its content if munged authenticated it nevertheless
            (expired, rewound, replayed), otherwise None.
    """

    credential: Credential | None = None


class CredentialExpiredError(CredentialError):
    """The credential has expired; the clocks of the two hosts may differ."""


class CredentialRewoundError(CredentialError):
    """The credential's time is in the future: the clocks of the two hosts differ."""


class CredentialReplayedError(CredentialError):
    """The credential was already decoded on this host."""


class CredentialUnauthorizedError(CredentialError):
    """Only another user may decode the credential."""


_HINT = {
    MungeMissingError: "is munged running? see: systemctl status munge",
    MungeBusyError: "munged is busy, or hangs; see: systemctl status munge",
    CredentialError: "do both hosts have the same munge.key?",
    CredentialExpiredError: "compare the clocks of both hosts, see: chronyc tracking",
    CredentialRewoundError: "compare the clocks of both hosts, see: chronyc tracking",
}
_NOT_THERE = (b"No such file", b"Connection refused", b"Permission denied")
"""In what libmunge says when no munged listens."""
_BY_CODE: dict[int, type[MungeError]] = {
    6: MungeMissingError,  # EMUNGE_SOCKET; see _Context.error
    7: MungeBusyError,  # EMUNGE_TIMEOUT
    15: CredentialExpiredError,
    16: CredentialRewoundError,
    17: CredentialReplayedError,
    18: CredentialUnauthorizedError,
} | dict.fromkeys(range(8, 15), CredentialError)


class Credential(Record, frozen=True):
    """Content of a credential: payload, and uid and gid of its sender."""

    payload: bytes
    uid: int
    gid: int


class Munge:
    """Encodes and decodes credentials; has no connection and is thread-safe."""

    def __init__(self, socket: str = "") -> None:
        """``socket`` is munged's socket; empty means libmunge's own default."""
        self._socket = socket

    def encode(self, payload: bytes, *, ttl_s: int = 0, only_uid: int | None = None) -> bytes:
        """Make a credential of this process's effective uid and gid.

        Args:
            payload: at most MAX_PAYLOAD bytes; munged compresses it if that makes it smaller.
            ttl_s: time to live in seconds, 0 for munged's default (300 s).
            only_uid: the only uid that may decode it; None for any.

        Raises:
            MungeMissingError: munged or libmunge is missing.
            MungeError: any other error, such as a payload that is too long.
        """
        if len(payload) > MAX_PAYLOAD:
            raise MungeError(f"message of {len(payload)} bytes is too long", f"munge accepts {MAX_PAYLOAD}")
        lib = _library()
        with _Context(lib, self._socket) as ctx:
            ctx.set(_OPT_ZIP, _ZIP_ZLIB)
            if ttl_s:
                ctx.set(_OPT_TTL, ttl_s)
            if only_uid is not None:
                ctx.set(_OPT_UID_RESTRICTION, only_uid)
            text = ctypes.c_void_p()
            code = lib.munge_encode(ctypes.byref(text), ctx.pointer, payload, len(payload))
            try:
                if code:
                    raise ctx.error(code, "cannot create a munge credential")
                return ctypes.string_at(text.value or 0)
            finally:
                _libc().free(text)

    def decode(self, credential: bytes) -> Credential:
        """Return the content of a credential after munged has authenticated it.

        Raises:
            MungeMissingError: munged or libmunge is missing.
            CredentialError: or a subclass: forged, damaged, expired, rewound,
                replayed on this host, or made for another user.
        """
        if b"\0" in credential:
            raise CredentialError("munge credential refused", "it contains a NUL byte")
        lib = _library()
        with _Context(lib, self._socket) as ctx:
            data, length = ctypes.c_void_p(), ctypes.c_int(0)
            uid, gid = ctypes.c_uint32(0xFFFFFFFF), ctypes.c_uint32(0xFFFFFFFF)
            code = lib.munge_decode(
                credential,
                ctx.pointer,
                ctypes.byref(data),
                ctypes.byref(length),
                ctypes.byref(uid),
                ctypes.byref(gid),
            )
            try:
                content = ctypes.string_at(data.value, length.value) if data.value else b""
            finally:
                _libc().free(data)
            found = Credential(content, uid.value, gid.value)
            if not code:
                return found
            error = ctx.error(code, "munge credential refused")
            if isinstance(error, CredentialExpiredError | CredentialRewoundError | CredentialReplayedError):
                error.credential = found
            raise error


class _Context:
    """A munge_ctx_t for one call, because threads cannot share contexts."""

    def __init__(self, lib: ctypes.CDLL, socket: str) -> None:
        self._lib = lib
        self._socket = socket
        self.pointer = ctypes.c_void_p()

    def __enter__(self) -> _Context:
        self.pointer = ctypes.c_void_p(self._lib.munge_ctx_create())
        if not self.pointer:
            raise MungeError("cannot create a munge context", "out of memory")
        if self._socket:
            # libmunge copies the string.
            self.set(_OPT_SOCKET, ctypes.c_char_p(self._socket.encode()))
        return self

    def __exit__(self, *_exc: object) -> None:
        self._lib.munge_ctx_destroy(self.pointer)

    def set(self, option: int, value: int | ctypes.c_char_p) -> None:
        argument = ctypes.c_int(value) if isinstance(value, int) else value
        code = self._lib.munge_ctx_set(self.pointer, ctypes.c_int(option), argument)
        if code:
            raise self.error(code, f"munge option {option} refused")

    def error(self, code: int, what: str) -> MungeError:
        detail = self._lib.munge_ctx_strerror(self.pointer) or self._lib.munge_strerror(code)
        kind = _BY_CODE.get(code, MungeError)
        if kind is MungeMissingError and not any(text in detail for text in _NOT_THERE):
            kind = MungeBusyError
        return kind(what, detail.decode(errors="replace"), _HINT.get(kind, ""))


def preload() -> None:
    """Load the libraries now, for processes that fork later; without libmunge they report it later."""
    with contextlib.suppress(MungeMissingError):
        _library()
    _libc()


@cache
def _library() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL("libmunge.so.2")
    except OSError as err:
        raise MungeMissingError("cannot load libmunge", str(err), "install the package libmunge2") from err
    lib.munge_ctx_create.restype = ctypes.c_void_p
    lib.munge_ctx_destroy.argtypes = [ctypes.c_void_p]
    lib.munge_ctx_destroy.restype = None
    lib.munge_ctx_strerror.argtypes = [ctypes.c_void_p]
    lib.munge_ctx_strerror.restype = ctypes.c_char_p
    lib.munge_strerror.argtypes = [ctypes.c_int]
    lib.munge_strerror.restype = ctypes.c_char_p
    pointer = ctypes.POINTER(ctypes.c_void_p)
    lib.munge_encode.argtypes = [pointer, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
    lib.munge_decode.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        pointer,
        ctypes.POINTER(ctypes.c_int),
        ctypes.POINTER(ctypes.c_uint32),
        ctypes.POINTER(ctypes.c_uint32),
    ]
    return lib


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.free.argtypes = [ctypes.c_void_p]
    libc.free.restype = None
    return libc
