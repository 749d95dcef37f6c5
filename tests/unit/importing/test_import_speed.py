# SPDX-License-Identifier: Apache-2.0
"""The quick ways of an import give what the ordinary ones give: headers, pipes, sources read in place."""

from __future__ import annotations

import hashlib
import io
import os
import random
import tarfile
import threading
from pathlib import Path

import pytest
from containers import entry, tar
from hypothesis import given
from hypothesis import strategies as st
from import_rig import applied

from vhpc_slurm.importing import rootfs
from vhpc_slurm.importing.hashing import FileHash
from vhpc_slurm.importing.headers import Header, header
from vhpc_slurm.importing.tree import RefusedError

FIELDS = ("name", "type", "linkname", "mode", "uid", "gid", "size", "mtime")
names = st.text(
    st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1, max_size=120
)
numbers = st.integers(0, 1 << 35)


def fields_of(block: bytes, reader: type[tarfile.TarInfo]) -> dict[str, object] | str:
    try:
        found = reader.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as err:
        return type(err).__name__
    return {name: getattr(found, name) for name in FIELDS}


@given(name=names, link=names, kind=st.sampled_from([*b"0123456xgLKS"]), number=st.tuples(*[numbers] * 5))
def test_a_header_is_read_as_tarfile_reads_it(
    name: str, link: str, kind: int, number: tuple[int, ...]
) -> None:
    info = entry(name, bytes([kind]), linkname=link, mode=number[0] & 0o7777, uid=number[1], gid=number[2])
    info.size, info.mtime = number[3] if kind in b"0123456" else 7, number[4]
    for block in (info.tobuf(tarfile.GNU_FORMAT), info.tobuf(tarfile.PAX_FORMAT)):
        last = block[-512:]
        assert fields_of(last, Header) == fields_of(last, tarfile.TarInfo)


@given(
    at=st.integers(0, 511), value=st.integers(0, 255), field=st.sampled_from([100, 124, 136, 148, 156, 345])
)
def test_a_damaged_header_is_read_as_tarfile_does(at: int, value: int, field: int) -> None:
    block = bytearray(tar(("some/name", "content"))[:512])
    block[at] = value
    block[field : field + 3] = bytes([value] * 3)
    for sound in (False, True):
        if sound:
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
        assert fields_of(bytes(block), Header) == fields_of(bytes(block), tarfile.TarInfo)


@given(name=names, link=names, kind=st.sampled_from([*b"0125"]), number=st.tuples(*[numbers] * 4))
def test_a_written_header_describes_its_entry(
    name: str, link: str, kind: int, number: tuple[int, ...]
) -> None:
    info = entry(name.strip("/") or "x", bytes([kind]), linkname=link if kind in b"12" else "")
    info.uid, info.gid, info.mtime = number[:3]
    with tarfile.open(fileobj=io.BytesIO(header(info) + bytes(1024)), encoding="utf-8") as archive:
        (found,) = archive.getmembers()
    assert {name: getattr(found, name) for name in FIELDS} == {name: getattr(info, name) for name in FIELDS}


def test_a_pipe_gets_the_same_bytes_as_a_file(tmp_path: Path) -> None:
    """Contents around the size from which pages are spliced, at odd offsets, with holes."""
    dice = random.Random(3)
    sizes = (0, 1, 511, 512, 65535, 65536, 65537, 3_000_001)
    files = [(f"f{size}", dice.randbytes(size)) for size in sizes]
    tree, paths = applied(tmp_path, tar(*files, entry("again", tarfile.LNKTYPE, linkname="f65537")))
    memory = io.BytesIO()
    rootfs.write_tar(tree, paths, memory)
    expected = memory.getvalue()
    read, write = os.pipe()
    with os.fdopen(read, "rb") as source, os.fdopen(write, "wb") as out:
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(source.read()))
        reader.start()
        rootfs.write_tar(tree, paths, out)
        out.close()
        reader.join()
    assert found == [expected]
    with tarfile.open(fileobj=io.BytesIO(expected)) as archive:
        assert {info.name: info.size for info in archive if info.isreg()} == {
            "again" if name == "f65537" else name: len(data) for name, data in files
        }


def test_digests_of_the_thread_are_those_of_hashlib(tmp_path: Path) -> None:
    data = random.Random(4).randbytes(9_000_001)
    (tmp_path / "x").write_bytes(data)
    assert FileHash(tmp_path / "x").digest() == f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.mark.promise("attack.source-swap")
@pytest.mark.parametrize("how", ["longer", "shorter", "other-bytes"])
def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, how: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 100_000)
    found = FileHash(path)
    os.utime(path, (1, 1))
    with path.open("r+b") as file:
        if how == "shorter":
            file.truncate(10)
        else:
            file.seek(0, os.SEEK_END if how == "longer" else os.SEEK_SET)
            file.write(b"y")
    with pytest.raises(RefusedError, match="it changed while it was read"):
        found.digest()
