# SPDX-License-Identifier: Apache-2.0
"""Disk images that users import: qemu-img makes sound ones, and other bytes are written into them.

Offsets are those of docs/interop/qcow2.rst of QEMU.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from vhpc_slurm.importing.diskformat import convert
from vhpc_slurm.importing.tree import RefusedError

MANY = 1 << 30
SIZE = 8 << 20

pytestmark = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="apt-get install qemu-utils")


def qemu_img(*arguments: str | Path) -> None:
    subprocess.run(["qemu-img", *arguments], check=True, capture_output=True)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A disk with some data in a hole-rich file."""
    path = tmp_path / "disk.raw"
    with path.open("wb") as file:
        file.truncate(SIZE)
        file.seek(5 << 20)
        file.write(b"data of a user" * 1000)
    return path


def made(raw: Path, kind: str, *options: str) -> Path:
    path = raw.with_name(f"made.{kind}")
    qemu_img("convert", "-f", "raw", "-O", kind, *options, raw, path)
    return path


def converted(path: Path, kind: str, max_bytes: int = MANY) -> tuple[str, bytes]:
    """The parts of a disk image that an import reads: its digest and its content."""
    target = path.with_name("out.raw")
    target.unlink(missing_ok=True)
    with path.open("rb") as source:
        digest = convert(source, kind, target, max_bytes, lambda _line: None)
    return digest, target.read_bytes()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qcow2", ()),
        ("qcow2", ("-c",)),
        ("qcow2", ("-o", "compat=0.10")),
        ("qcow2", ("-c", "-o", "compression_type=zstd")),
        ("vmdk", ()),
        ("vmdk", ("-o", "subformat=streamOptimized")),
        ("raw", ()),
    ],
)
def test_a_disk_has_the_same_bytes_in_every_format(raw: Path, kind: str, options: tuple[str, ...]) -> None:
    path = made(raw, kind, *options)
    digest, content = converted(path, kind)
    assert content == raw.read_bytes()
    assert digest == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert path.with_name("out.raw").stat().st_blocks * 512 < SIZE  # holes stay holes


def put(form: str, offset: int, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(form, data, offset, value)


def cut(size: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        del data[size:]

    return change


def odd_entry(data: bytearray) -> None:
    """The first entry of the first table is the offset of a second one, which starts at a cluster."""
    (table,) = struct.unpack_from(">Q", data, 40)
    struct.pack_into(">Q", data, table, 1 << 63 | 0x10200)


def second_format(data: bytearray) -> None:
    """The descriptor of an ISO 9660 file system where a reader of that format looks for it."""
    data[32769:32774] = b"CD001"


HOSTILE: dict[str, tuple[Callable[[bytearray], None], str]] = {
    "backing file": (put(">Q", 8, 512), "it has a backing file"),
    "external data file": (put(">Q", 72, 1 << 2), "it has an external data file"),
    "unknown feature": (put(">Q", 72, 1 << 5), "Unknown QCOW2 features"),
    "feature of a far bit": (put(">Q", 72, 1 << 63), "Unknown QCOW2 features"),
    "version 1": (put(">I", 4, 1), "Unsupported qcow2 version"),
    "version 9": (put(">I", 4, 9), "Unsupported qcow2 version"),
    "encrypted": (put(">I", 32, 1), "it is encrypted"),
    "encrypted by LUKS": (put(">I", 32, 2), "it is encrypted"),
    "snapshots": (put(">I", 60, 3), "it has 3 snapshots"),
    "tiny clusters": (put(">I", 20, 3), r"its clusters have 2\^3 bytes"),
    "huge clusters": (put(">I", 20, 63), r"its clusters have 2\^63 bytes"),
    "no disk": (put(">Q", 24, 0), "its disk has 0 bytes"),
    "a disk of exabytes": (put(">Q", 24, 1 << 62), "1 TiB are permitted"),
    "many entries of the first table": (put(">I", 36, 0x7FFFFFFF), "its first table makes no sense"),
    "first table beyond the file": (put(">Q", 40, 1 << 40), "its first table makes no sense"),
    "first table at an odd byte": (put(">Q", 40, 65537), "its first table makes no sense"),
    "reference counts of gigabytes": (put(">I", 56, 1 << 20), "its table of reference counts is too large"),
    "first table that points to an odd byte": (odd_entry, "qemu-img cannot convert it"),
    "two formats": (second_format, "Multiple formats detected|its content is"),
    "another magic": (put(">I", 0, 0), "it is not a qcow2 file"),
    "cut in its header": (cut(40), "it is not a (sound )?qcow2 file"),
    "cut after its header": (cut(1024), "its first table makes no sense"),
    "empty": (cut(0), "it is not a (sound )?qcow2 file"),
}


@pytest.mark.promise("attack.disk-image")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_qcow2_is_refused(raw: Path, name: str) -> None:
    change, says = HOSTILE[name]
    path = made(raw, "qcow2")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    with pytest.raises(RefusedError, match=says):
        converted(path, "qcow2")


@pytest.mark.promise("attack.disk-image")
def test_a_vmdk_that_names_other_files_is_refused(raw: Path) -> None:
    secret = raw.with_name("secret")
    secret.write_bytes(b"x" * SIZE)
    path = raw.with_name("named.vmdk")
    path.write_text(
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n"
        f'createType="monolithicFlat"\nRW {SIZE // 512} FLAT "{secret}" 0\n'
    )
    with pytest.raises(RefusedError):
        converted(path, "vmdk")
    path = made(raw, "vmdk")
    data = path.read_bytes()
    assert data.count(b'SPARSE "made.vmdk"') == 1
    path.write_bytes(data.replace(b'SPARSE "made.vmdk"', b'SPARSE "/etc/magic"'))
    with pytest.raises(RefusedError):
        converted(path, "vmdk")


@pytest.mark.parametrize(
    ("is_", "stated"), [("qcow2", "raw"), ("vmdk", "raw"), ("vdi", "raw"), ("vmdk", "qcow2")]
)
def test_a_format_is_stated_and_never_found_out(raw: Path, is_: str, stated: str) -> None:
    with pytest.raises(RefusedError, match=f"it is not a {stated} file: its content is {is_}"):
        converted(made(raw, is_), stated)


@pytest.mark.promise("attack.disk-image")
def test_a_compressed_disk_may_not_grow_beyond_the_limit(raw: Path) -> None:
    with raw.open("wb") as file:
        for _ in range(256):
            file.write(b"one line of text, which compresses well\n" * 26214)
    path = made(raw, "qcow2", "-c")
    assert path.stat().st_size < 8 << 20
    with pytest.raises(RefusedError, match="it has more than 32 MiB when unpacked"):
        converted(path, "qcow2", 32 << 20)


def test_a_link_in_place_of_a_checked_disk_is_not_followed(raw: Path) -> None:
    """qemu-img gets the descriptor that was checked: a link put in its place is not followed."""
    path = made(raw, "qcow2")
    secret = raw.with_name("secret")
    secret.write_bytes(b"secret" * 100)
    target = path.with_name("out.raw")
    with path.open("rb") as source:
        path.unlink()
        path.symlink_to(secret)
        convert(source, "qcow2", target, MANY, lambda _line: None)
    assert target.read_bytes() == raw.read_bytes()


def test_hosts_without_the_tool_name_its_package(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(RefusedError, match="package qemu-utils"):
        converted(made(raw, "qcow2"), "qcow2")


def test_a_raw_disk_may_have_partitions(raw: Path) -> None:
    data = bytearray(raw.read_bytes())
    data[446:462] = struct.pack("<B3sB3sII", 0x80, b"\0\2\0", 0x83, b"\xff\xff\xff", 2048, 8192)
    data[510:512] = b"\x55\xaa"
    raw.write_bytes(data)
    assert converted(raw, "raw")[1] == bytes(data)


def test_the_limit_of_a_disk_is_that_of_its_files(tmp_path: Path) -> None:
    assert os.statvfs(tmp_path).f_bsize  # the test's file system has holes
    path = tmp_path / "holes.raw"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    assert len(converted(path, "raw", 1 << 20)[1]) == 64 << 20
