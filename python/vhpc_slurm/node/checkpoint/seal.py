# SPDX-License-Identifier: Apache-2.0
"""Seals: proof that a file is, byte for byte, the state that a node has saved of one guest.

QEMU does not defend itself against the writer of a state that it loads, so nothing of a file reaches it
before the bytes are proven.  A file is divided into chunks; each has a tag, a keyed hash of the checkpoint,
the file's name, the chunk's number and its bytes.  The tags are in a file of their own, so that chunks
stay aligned for direct I/O.  The seal has the number of bytes and a keyed hash of all tags; vhpcd keeps it
with the key, and neither is ever in the folder of checkpoints.

With ``checkpoint.encrypt`` chunks are encrypted by AES-256-GCM (NIST SP 800-38D). The key of a file is
derived from the checkpoint's key and the file's name. The tag of such a chunk is GCM's tag, its nonce and
zeros; nonces are random, so that a chunk that is written again has another one. Whether a file is encrypted
is in all its keyed hashes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Iterator

from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import Seal
from vhpc_slurm.record import Record

CHUNK = 4 << 20
"""Bytes of a chunk; the last one of a file may be shorter."""
KEY_BYTES = TAG_BYTES = 32
GCM_TAG_BYTES, NONCE_BYTES = 16, 12
_PERSON, _ENCRYPTED = b"vhpc-checkpoint", b"vhpc-encrypted"
_NUMBER = struct.Struct("<QI")


class SealKey(Record, frozen=True):
    """The keys and counters of one file's seals.

    Attributes:
        key: of the checkpoint; secret.
        serial: of the checkpoint, unique for the site.
        file: name of the file in the checkpoint's folder.
        encrypted: its chunks are.
    """

    key: bytes
    serial: int
    file: str
    encrypted: bool = False

    def __repr__(self) -> str:
        return f"SealKey({self.serial}/{self.file})"


class BrokenSealError(UserError):
    """A file is not the one that was sealed; nothing of it may be loaded."""

    def __init__(self, key: SealKey, why: str) -> None:
        super().__init__(
            f"the checkpoint cannot be used: its file {key.serial}/{key.file} is damaged",
            why,
            "use an older checkpoint, see: vhpc checkpoint ls",
        )


class Sealer:
    """Makes the tags and the seal of a file while it is written, and encrypts it if its key says so."""

    def __init__(self, key: SealKey) -> None:
        """NodeError: this host cannot encrypt."""
        self._keyed = _keyed(key)
        self._cipher = _Cipher(self._keyed) if key.encrypted else None
        self._size, self._short = 0, False
        self.tags = bytearray()

    def add(self, chunk: bytes | memoryview) -> bytes | memoryview:
        """Return what is written for the next chunk: as many bytes, encrypted or the same.

        Raises:
            ValueError: it is empty or too long, or a shorter one has ended the file.
        """
        if not 0 < len(chunk) <= CHUNK or self._short:
            raise ValueError(f"a chunk of {len(chunk)} bytes at {self._size}")
        written, tag = self._made(len(self.tags) // TAG_BYTES, chunk)
        self.tags += tag
        self._size += len(chunk)
        self._short = len(chunk) < CHUNK
        return written

    def replace_first(self, chunk: bytes | memoryview) -> bytes | memoryview:
        """Return what is written for the first chunk again, with other bytes of the same number."""
        written, self.tags[:TAG_BYTES] = self._made(0, chunk)
        return written

    def seal(self) -> Seal:
        """The seal of all chunks."""
        root = _root(self._keyed, self._size, self.tags)
        return Seal(self._size, root, self._cipher is not None)

    def _made(self, number: int, chunk: bytes | memoryview) -> tuple[bytes | memoryview, bytes]:
        if self._cipher is None:
            return chunk, _tag(self._keyed, number, chunk)
        return self._cipher.encrypt(number, chunk)


class _Cipher:
    """AES-256-GCM of the chunks of one file."""

    def __init__(self, keyed: hashlib.blake2b) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as err:
            hint = "install python3-cryptography"
            raise NodeError("this host cannot encrypt or decrypt checkpoints", str(err), hint) from err
        state = keyed.copy()
        state.update(b"key of AES-256-GCM")
        self._aead, self._invalid = AESGCM(state.digest()), InvalidTag

    def encrypt(self, number: int, chunk: bytes | memoryview) -> tuple[memoryview, bytes]:
        """Return the encrypted bytes of a chunk, and its tag."""
        nonce = os.urandom(NONCE_BYTES)
        made = memoryview(self._aead.encrypt(nonce, chunk, self._about(number, len(chunk))))
        tag = bytes(made[-GCM_TAG_BYTES:]) + nonce
        return made[:-GCM_TAG_BYTES], tag.ljust(TAG_BYTES, b"\0")

    def decrypt(self, number: int, chunk: bytes, tag: bytes) -> bytes | None:
        """The bytes of a chunk; None if it or its tag was changed."""
        nonce = tag[GCM_TAG_BYTES : GCM_TAG_BYTES + NONCE_BYTES]
        try:
            return self._aead.decrypt(nonce, chunk + tag[:GCM_TAG_BYTES], self._about(number, len(chunk)))
        except self._invalid:
            return None

    @staticmethod
    def _about(number: int, length: int) -> bytes:
        return b"chunk" + _NUMBER.pack(number, length)


def verified(read: Callable[[int], bytes], tags: bytes, seal: Seal, key: SealKey) -> Iterator[bytes]:
    """The chunks of a file, decrypted, each after it was proven.

    Args:
        read: reads at most so many bytes on, like ``read`` of an open file; empty at the end.
        tags: the file's tags.
        seal: its seal.
        key: of the file.

    Raises:
        BrokenSealError: tags or chunks are others, or the file is shorter or longer.
        NodeError: this host cannot decrypt.
        OSError: of ``read``.
    """
    keyed = _keyed(key)
    cipher = _Cipher(keyed) if key.encrypted else None
    if not hmac.compare_digest(_root(keyed, seal.size, tags), seal.root):
        raise BrokenSealError(key, "its tags were changed")
    for number in range(-(-seal.size // CHUNK)):
        length = min(CHUNK, seal.size - number * CHUNK)
        chunk = _exactly(read, length)
        if len(chunk) < length:
            raise BrokenSealError(key, f"it ends after {number * CHUNK + len(chunk)} of {seal.size} bytes")
        tag = tags[number * TAG_BYTES : (number + 1) * TAG_BYTES]
        proven: bytes | None
        if cipher is not None:
            proven = cipher.decrypt(number, chunk, tag)
        else:
            proven = chunk if hmac.compare_digest(_tag(keyed, number, chunk), tag) else None
        if proven is None:
            raise BrokenSealError(key, f"its bytes from {number * CHUNK} on were changed")
        yield proven
    if read(1):
        raise BrokenSealError(key, f"it has more than {seal.size} bytes")


def _keyed(key: SealKey) -> hashlib.blake2b:
    if len(key.key) != KEY_BYTES:
        raise ValueError(f"a key of {len(key.key)} bytes")
    name = key.file.encode()
    person = _ENCRYPTED if key.encrypted else _PERSON
    keyed = hashlib.blake2b(key=key.key, digest_size=TAG_BYTES, person=person)
    keyed.update(_NUMBER.pack(key.serial, len(name)) + name)
    return keyed


def _tag(keyed: hashlib.blake2b, number: int, chunk: bytes | memoryview) -> bytes:
    state = keyed.copy()
    state.update(b"chunk" + _NUMBER.pack(number, len(chunk)))
    state.update(chunk)
    return state.digest()


def _root(keyed: hashlib.blake2b, size: int, tags: bytes | bytearray) -> bytes:
    state = keyed.copy()
    state.update(b"whole" + _NUMBER.pack(size, len(tags)))
    state.update(tags)
    return state.digest()


def _exactly(read: Callable[[int], bytes], length: int) -> bytes:
    """So many bytes, fewer only at the end of the file."""
    parts, missing = [], length
    while missing and (part := read(missing)):
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
