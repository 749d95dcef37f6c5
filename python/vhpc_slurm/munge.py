# SPDX-License-Identifier: Apache-2.0
"""MUNGE credentials through libmunge.

A credential proves to its reader which uid and gid made it, on any host that
shares the key, within a time to live.  Sources: munge(7), munge.h of libmunge2.

munged notices that a credential is decoded twice *on one host*; who must know
that a message is fresh keeps a nonce inside the payload as well.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

from vhpc_slurm.errors import FabricError

MAX_PAYLOAD = (1 << 20) - 4096
"""Largest payload in bytes: munged takes requests of at most 1 MiB with their framing."""

_OPT_ZIP, _OPT_TTL, _OPT_SOCKET, _OPT_UID_RESTRICTION = 2, 4, 8, 9
_ZIP_ZLIB = 3


class MungeError(FabricError):
    """libmunge or munged could not do it, for a reason that is not the credential's."""


class MungeMissingError(MungeError):
    """No munged behind the socket, or no libmunge on this host."""


class CredentialError(MungeError):
    """The credential was refused.

    Attributes:
        credential: what it held where munged vouches for the content all the
            same (expired, rewound, replayed), else None.
    """

    credential: Credential | None = None


class CredentialExpiredError(CredentialError):
    """Its time to live is over; the clocks of the two hosts may differ."""


class CredentialRewoundError(CredentialError):
    """It comes from the future: the clocks of the two hosts differ."""


class CredentialReplayedError(CredentialError):
    """It was decoded on this host before."""


class CredentialUnauthorizedError(CredentialError):
    """It may be decoded by another user only."""


_CURE = {
    MungeMissingError: "is munged running? see: systemctl status munge",
    CredentialError: "do both hosts have the same munge.key?",
    CredentialExpiredError: "compare the clocks of both hosts, see: chronyc tracking",
    CredentialRewoundError: "compare the clocks of both hosts, see: chronyc tracking",
}
_BY_CODE: dict[int, type[MungeError]] = {
    6: MungeMissingError,  # EMUNGE_SOCKET
    7: MungeMissingError,  # EMUNGE_TIMEOUT
    15: CredentialExpiredError,
    16: CredentialRewoundError,
    17: CredentialReplayedError,
    18: CredentialUnauthorizedError,
} | dict.fromkeys(range(8, 15), CredentialError)


@dataclass(frozen=True)
class Credential:
    """What a credential says: bytes, and who made it."""

    payload: bytes
    uid: int
    gid: int


class Munge:
    """Encodes and decodes; holds no connection, may be used by many threads."""

    def __init__(self, socket: str = "") -> None:
        """``socket`` is munged's socket; empty means libmunge's own default."""
        self._socket = socket

    def encode(self, payload: bytes, *, ttl_s: int = 0, only_uid: int | None = None) -> bytes:
        """Make a credential of this process's effective uid and gid.

        Args:
            payload: at most MAX_PAYLOAD bytes; compressed by munged where that helps.
            ttl_s: time to live in seconds, 0 for munged's default (300 s).
            only_uid: the only uid that may decode it; None for any.

        Raises:
            MungeMissingError: munged or libmunge is missing.
            MungeError: anything else, such as a payload that is too long.
        """
        if len(payload) > MAX_PAYLOAD:
            raise MungeError(f"message of {len(payload)} bytes is too long", f"munge takes {MAX_PAYLOAD}")
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
                    raise ctx.error(code, "cannot make a munge credential")
                return ctypes.string_at(text.value or 0)
            finally:
                _libc().free(text)

    def decode(self, credential: bytes) -> Credential:
        """Return what a credential says, after munged has vouched for it.

        Raises:
            MungeMissingError: munged or libmunge is missing.
            CredentialError: and its kinds: forged, damaged, expired, rewound,
                replayed on this host, or meant for another user.
        """
        if b"\0" in credential:
            raise CredentialError("munge credential refused", "it holds a NUL byte")
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
    """A munge_ctx_t for the length of one call: contexts are not for sharing among threads."""

    def __init__(self, lib: ctypes.CDLL, socket: str) -> None:
        self._lib = lib
        self._socket = socket
        self.pointer = ctypes.c_void_p()

    def __enter__(self) -> _Context:
        self.pointer = ctypes.c_void_p(self._lib.munge_ctx_create())
        if not self.pointer:
            raise MungeError("cannot make a munge context", "out of memory")
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
        return kind(what, detail.decode(errors="replace"), _CURE.get(kind, ""))


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
