# SPDX-License-Identifier: Apache-2.0
"""Seals of saved guests: what was saved comes back, and any other byte is refused before it is loaded."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vhpc_slurm.model import Seal
from vhpc_slurm.node.checkpoint import seal
from vhpc_slurm.node.checkpoint.seal import CHUNK, BrokenSealError, Sealer, SealKey, verified

SECRET, OTHER = bytes(range(32)), bytes(32)
KEY = SealKey(SECRET, 7, "0.state")
STATE = random.Random(7).randbytes(2 * CHUNK + 1000)


def sealed(state: bytes, key: SealKey = KEY) -> tuple[bytes, Seal]:
    sealer = Sealer(key)
    for begin in range(0, len(state), CHUNK):
        sealer.add(state[begin : begin + CHUNK])
    return bytes(sealer.tags), sealer.seal()


def read(state: bytes, tags: bytes, proof: Seal, key: SealKey = KEY) -> bytes:
    return b"".join(verified(io.BytesIO(state).read, tags, proof, key))


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_a_sealed_state_comes_back(size: int) -> None:
    tags, proof = sealed(STATE[:size])
    assert read(STATE[:size], tags, proof) == STATE[:size]
    assert (proof.size, len(tags)) == (size, 32 * -(-size // CHUNK))


def test_tags_are_those_of_blake2b() -> None:
    """The construction, written a second time: another program must be able to make the same."""
    tags, proof = sealed(STATE[:10])

    def keyed(*parts: bytes) -> bytes:
        data = b"".join(parts)
        return hashlib.blake2b(data, key=SECRET, digest_size=32, person=b"vhpc-checkpoint").digest()

    head = (7).to_bytes(8, "little") + (7).to_bytes(4, "little") + b"0.state"
    assert tags == keyed(head, b"chunk", bytes(8), (10).to_bytes(4, "little"), STATE[:10])
    sizes = (10).to_bytes(8, "little") + (32).to_bytes(4, "little")
    assert proof.root == keyed(head, b"whole", sizes, tags)


def short_reads(state: bytes, sizes: list[int]) -> Callable[[int], bytes]:
    file, turns = io.BytesIO(state), iter(sizes * len(state))
    return lambda most: file.read(min(most, next(turns)))


def test_a_pipe_may_give_less_than_was_asked() -> None:
    tags, proof = sealed(STATE)
    parts = list(verified(short_reads(STATE, [1 << 20, 7]), tags, proof, KEY))
    assert [len(part) for part in parts] == [CHUNK, CHUNK, 1000]
    assert b"".join(parts) == STATE


@settings(max_examples=40, deadline=None)
@given(at=st.integers(0, len(STATE) - 1), bit=st.integers(0, 7))
def test_a_changed_bit_is_found_and_its_chunk_not_given(at: int, bit: int) -> None:
    tags, proof = sealed(STATE)
    changed = bytearray(STATE)
    changed[at] ^= 1 << bit
    given: list[bytes] = []
    with pytest.raises(BrokenSealError, match=r"0\.state is damaged: its bytes from"):
        given.extend(verified(io.BytesIO(changed).read, tags, proof, KEY))
    assert b"".join(given) == STATE[: at // CHUNK * CHUNK]


SWAPPED = STATE[CHUNK : 2 * CHUNK] + STATE[:CHUNK] + STATE[2 * CHUNK :]


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (SWAPPED, "its bytes from 0 on were changed"),
        (STATE[:-1], f"it ends after {len(STATE) - 1} of {len(STATE)} bytes"),
        (STATE[:CHUNK], f"it ends after {CHUNK} of {len(STATE)} bytes"),
        (b"", f"it ends after 0 of {len(STATE)} bytes"),
        (STATE + b"x", f"it has more than {len(STATE)} bytes"),
    ],
    ids=["swapped-chunks", "last-byte-cut", "cut-at-a-chunk", "empty", "longer"],
)
def test_another_state_is_refused(state: bytes, why: str) -> None:
    tags, proof = sealed(STATE)
    with pytest.raises(BrokenSealError) as caught:
        read(state, tags, proof)
    assert caught.value.why == why


def test_tags_and_state_of_others_are_refused() -> None:
    """A state is bound to its checkpoint, file and key, even with all of its own tags and seal."""
    keys = [
        SealKey(secret, serial, file)
        for secret in (SECRET, OTHER)
        for serial in (7, 8)
        for file in ("0.state", "0.disk")
    ]
    made = {(key.key, key.serial, key.file): (key, *sealed(STATE, key)) for key in keys}
    for (own, tags, proof), (other, _, foreign) in pairwise(made.values()):
        for claimed in (proof, foreign):
            with pytest.raises(BrokenSealError, match="tags were changed"):
                read(STATE, tags, claimed, other)
        assert read(STATE, tags, proof, own) == STATE


@pytest.mark.parametrize("cut", [-1, -32, 32])
def test_changed_tags_are_refused_before_a_byte_is_read(cut: int) -> None:
    tags, proof = sealed(STATE)

    def never(_: int) -> bytes:
        raise AssertionError("read")

    with pytest.raises(BrokenSealError, match="tags were changed"):
        next(verified(never, tags[:cut], proof, KEY))


@pytest.mark.parametrize("chunk", [b"", bytes(CHUNK + 1)])
def test_chunks_have_their_size(chunk: bytes) -> None:
    with pytest.raises(ValueError, match="a chunk of"):
        Sealer(KEY).add(chunk)


def test_only_the_last_chunk_is_shorter() -> None:
    sealer = Sealer(KEY)
    sealer.add(b"end")
    with pytest.raises(ValueError, match="a chunk of 1 bytes at 3"):
        sealer.add(b"x")


def test_a_key_has_32_bytes_and_is_not_shown() -> None:
    with pytest.raises(ValueError, match="a key of 31 bytes"):
        Sealer(SealKey(bytes(31), 7, "0.state"))
    assert seal.KEY_BYTES == 32
    assert repr(KEY) == "SealKey(7/0.state)"
