# SPDX-License-Identifier: Apache-2.0
"""Seals: proof that a file is, byte for byte, the state that a node has saved of one guest.

QEMU does not defend itself against the writer of a state that it loads, so nothing of a file reaches it
before the bytes are proven.  A file is divided into chunks; each has a tag, a keyed hash of the checkpoint,
the file's name, the chunk's number and its bytes.  The tags are in a file of their own, so that chunks
stay aligned for direct I/O.  The seal has the number of bytes and a keyed hash of all tags; vhpcd keeps it
with the key, and neither is ever in the folder of checkpoints.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Iterator

from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Seal
from vhpc_slurm.record import Record

CHUNK = 4 << 20
"""Bytes of a chunk; the last one of a file may be shorter."""
KEY_BYTES = TAG_BYTES = 32
_PERSON = b"vhpc-checkpoint"
_NUMBER = struct.Struct("<QI")


class SealKey(Record, frozen=True):
    """The keys and counters of one file's seals.

    Attributes:
        key: of the checkpoint; secret.
        serial: of the checkpoint, unique for the site.
        file: name of the file in the checkpoint's folder.
    """

    key: bytes
    serial: int
    file: str

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
    """Makes the tags and the seal of a file while it is written."""

    def __init__(self, key: SealKey) -> None:
        self._keyed = _keyed(key)
        self._size, self._short = 0, False
        self.tags = bytearray()

    def add(self, chunk: bytes | memoryview) -> bytes:
        """The tag of the next chunk.

        Raises:
            ValueError: it is empty or too long, or a shorter one has ended the file.
        """
        if not 0 < len(chunk) <= CHUNK or self._short:
            raise ValueError(f"a chunk of {len(chunk)} bytes at {self._size}")
        tag = _tag(self._keyed, len(self.tags) // TAG_BYTES, chunk)
        self.tags += tag
        self._size += len(chunk)
        self._short = len(chunk) < CHUNK
        return tag

    def replace_first(self, chunk: bytes | memoryview) -> None:
        """The first chunk was written again, with other bytes of the same number."""
        self.tags[:TAG_BYTES] = _tag(self._keyed, 0, chunk)

    def seal(self) -> Seal:
        """The seal of all chunks."""
        root = _root(self._keyed, self._size, self.tags)
        return Seal(self._size, root)


def verified(read: Callable[[int], bytes], tags: bytes, seal: Seal, key: SealKey) -> Iterator[bytes]:
    """The chunks of a file, each after it was proven.

    Args:
        read: reads at most so many bytes on, like ``read`` of an open file; empty at the end.
        tags: the file's tags.
        seal: its seal.
        key: of the file.

    Raises:
        BrokenSealError: tags or chunks are others, or the file is shorter or longer.
        OSError: of ``read``.
    """
    keyed = _keyed(key)
    if not hmac.compare_digest(_root(keyed, seal.size, tags), seal.root):
        raise BrokenSealError(key, "its tags were changed")
    for number in range(-(-seal.size // CHUNK)):
        length = min(CHUNK, seal.size - number * CHUNK)
        chunk = _exactly(read, length)
        if len(chunk) < length:
            raise BrokenSealError(key, f"it ends after {number * CHUNK + len(chunk)} of {seal.size} bytes")
        tag = tags[number * TAG_BYTES : (number + 1) * TAG_BYTES]
        if not hmac.compare_digest(_tag(keyed, number, chunk), tag):
            raise BrokenSealError(key, f"its bytes from {number * CHUNK} on were changed")
        yield chunk
    if read(1):
        raise BrokenSealError(key, f"it has more than {seal.size} bytes")


def _keyed(key: SealKey) -> hashlib.blake2b:
    if len(key.key) != KEY_BYTES:
        raise ValueError(f"a key of {len(key.key)} bytes")
    name = key.file.encode()
    keyed = hashlib.blake2b(key=key.key, digest_size=TAG_BYTES, person=_PERSON)
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
