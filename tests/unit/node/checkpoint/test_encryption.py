# SPDX-License-Identifier: Apache-2.0
"""Encrypted files of checkpoints: nothing of the guest is in them, and no other byte is accepted."""

from __future__ import annotations

import builtins
import hashlib
import io
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import KEY, RESUME, changed, nothing_is_left, root
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from libvirt_ends import NEW_XML, PADDED, Restored, header, snapshot, state
from stepd import needs_root

from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import SavedGuest, Seal
from vhpc_slurm.node.checkpoint import folder, restore, save
from vhpc_slurm.node.checkpoint.seal import CHUNK, BrokenSealError, Sealer, SealKey, verified

__all__ = ["nothing_is_left", "root"]
SECRET = replace(KEY, encrypted=True)
TEXT = b"the password of alice is correct horse battery staple"
CONTENT = bytearray(random.Random(9).randbytes(2 * CHUNK + 1000))
CONTENT[CHUNK - 20 : CHUNK - 20 + len(TEXT)] = TEXT
STATE = bytes(CONTENT)


def sealed(content: bytes = STATE, key: SealKey = SECRET) -> tuple[bytes, bytes, Seal]:
    """The bytes of the file, its tags and its seal."""
    sealer = Sealer(key)
    parts = [bytes(sealer.add(content[at : at + CHUNK])) for at in range(0, len(content), CHUNK)]
    return b"".join(parts), bytes(sealer.tags), sealer.seal()


FILE, TAGS, PROOF = sealed()


def read(file: bytes, tags: bytes = TAGS, proof: Seal = PROOF, key: SealKey = SECRET) -> bytes:
    return b"".join(verified(io.BytesIO(file).read, tags, proof, key))


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1, len(STATE)])
def test_an_encrypted_state_comes_back(size: int) -> None:
    file, tags, proof = sealed(STATE[:size])
    assert read(file, tags, proof) == STATE[:size]
    assert (len(file), proof.size, proof.encrypted) == (size, size, True)


def test_chunks_are_those_of_aes_gcm() -> None:
    """The construction, written a second time with the cipher's primitive mode."""
    head = (7).to_bytes(8, "little") + (7).to_bytes(4, "little") + b"0.state"

    def keyed(*parts: bytes) -> bytes:
        data = b"".join((head, *parts))
        return hashlib.blake2b(data, key=KEY.key, digest_size=32, person=b"vhpc-encrypted").digest()

    tag, nonce, rest = TAGS[32:48], TAGS[48:60], TAGS[60:64]
    secret = algorithms.AES(keyed(b"key of AES-256-GCM"))
    reader = Cipher(secret, modes.GCM(nonce, tag)).decryptor()
    reader.authenticate_additional_data(b"chunk" + (1).to_bytes(8, "little") + CHUNK.to_bytes(4, "little"))
    chunk = FILE[CHUNK : 2 * CHUNK]
    assert reader.update(chunk) + reader.finalize() == STATE[CHUNK : 2 * CHUNK]
    assert rest == bytes(4)
    sizes = len(STATE).to_bytes(8, "little") + (96).to_bytes(4, "little")
    assert PROOF.root == keyed(b"whole", sizes, TAGS)


@pytest.mark.promise("attack.saved")
@settings(max_examples=40, deadline=None)
@given(at=st.integers(0, len(STATE) - 1), bit=st.integers(0, 7))
def test_a_changed_bit_of_an_encrypted_file_is_found(at: int, bit: int) -> None:
    file = bytearray(FILE)
    file[at] ^= 1 << bit
    given: list[bytes] = []
    with pytest.raises(BrokenSealError, match="its bytes from"):
        given.extend(verified(io.BytesIO(file).read, TAGS, PROOF, SECRET))
    assert b"".join(given) == STATE[: at // CHUNK * CHUNK]


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (FILE[CHUNK : 2 * CHUNK] + FILE[:CHUNK] + FILE[2 * CHUNK :], "its bytes from 0 on"),
        (FILE[:-1], "it ends after"),
        (FILE[:CHUNK], "it ends after"),
        (b"", "it ends after 0"),
        (FILE + b"x", "it has more than"),
        (STATE, "its bytes from 0 on"),
    ],
    ids=["swapped", "last-byte-cut", "cut-at-a-chunk", "empty", "longer", "not-encrypted"],
)
def test_another_encrypted_file_is_refused(file: bytes, why: str) -> None:
    with pytest.raises(BrokenSealError, match=why):
        read(file)


@settings(max_examples=30, deadline=None)
@given(at=st.integers(0, len(TAGS) - 1))
def test_changed_tags_are_refused(at: int) -> None:
    tags = bytearray(TAGS)
    tags[at] ^= 1
    with pytest.raises(BrokenSealError, match="tags were changed"):
        read(FILE, bytes(tags))


@pytest.mark.promise("attack.saved")
def test_encryption_cannot_be_turned_off_or_on() -> None:
    plain = sealed(key=KEY)
    for made, other in ((plain, SECRET), ((FILE, TAGS, PROOF), KEY)):
        with pytest.raises(BrokenSealError, match="tags were changed"):
            read(*made, other)


def test_files_of_others_are_refused() -> None:
    for other in (
        replace(SECRET, key=bytes(32)),
        replace(SECRET, serial=8),
        replace(SECRET, file="0.disk"),
    ):
        with pytest.raises(BrokenSealError, match="tags were changed"):
            read(*sealed(key=other))


def test_no_nonce_is_used_twice() -> None:
    sealer = Sealer(SECRET)
    first = bytes(sealer.add(STATE[:CHUNK]))
    nonces = {bytes(sealer.tags[16:28])}
    again = bytes(sealer.replace_first(STATE[:CHUNK]))
    nonces.add(bytes(sealer.tags[16:28]))
    for _ in range(3):
        _, tags, _ = sealed()
        nonces |= {tags[at + 16 : at + 28] for at in (0, 32, 64)}
    assert len(nonces) == 11
    assert first != again


@pytest.mark.promise("attack.saved")
@needs_root
@pytest.mark.parametrize("size", [200_000, CHUNK, 2 * CHUNK + 777])
def test_a_text_of_the_guest_is_in_no_file(root: Path, tmp_path: Path, size: int) -> None:
    data = bytearray(state(size))
    for at in (PADDED + 200, size - len(TEXT)):
        data[at : at + len(TEXT)] = TEXT
    with folder.made(root, 7) as place:
        seal = save.save_state(
            place, SECRET, tmp_path / "fifo", lambda path: snapshot(path, bytes(data), header())
        )
    files = sorted((root / "7").iterdir())
    assert [path.name for path in files] == ["0.state", "0.state.tags"]
    for path in files:
        found = path.read_bytes()
        assert TEXT[:16] not in found
        assert b"<name>" not in found
        assert b"Libvirt" not in found
        assert KEY.key not in found
    libvirt = Restored()
    guest = SavedGuest(0, "n1", 1, 1, seal)
    restore.restore_state(root, RESUME, guest, tmp_path / "fifo", NEW_XML, libvirt.load)
    assert libvirt.all[92 + PADDED :] == data[92 + PADDED :]
    changed(root / "7/0.state", size - 1, b"?")
    with pytest.raises(BrokenSealError):
        restore.restore_state(root, RESUME, guest, tmp_path / "fifo", NEW_XML, Restored().load)


@needs_root
def test_a_disk_is_encrypted_too(root: Path, tmp_path: Path) -> None:
    disk, new = tmp_path / "disk", tmp_path / "new"
    disk.write_bytes(bytes(CHUNK) + TEXT + STATE)
    with folder.made(root, 7) as place:
        seal = save.save_disk(place, replace(SECRET, file="0.disk"), disk)
    assert TEXT[:16] not in (root / "7/0.disk").read_bytes()
    new.write_bytes(b"")
    with new.open("r+b") as file:
        file.truncate(disk.stat().st_size)
    restore.restore_disk(root, RESUME, SavedGuest(0, "n1", 1, 1, Seal(0, b""), seal), new)
    assert new.read_bytes() == disk.read_bytes()


def test_a_host_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *others: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NodeError, match=r"cannot encrypt or decrypt.*install python3-cryptography"):
        Sealer(SECRET)
    Sealer(KEY)
