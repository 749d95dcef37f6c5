# SPDX-License-Identifier: Apache-2.0
"""Archive, kernel and programs of an initrd, each checked against the tool that it must agree with."""

from __future__ import annotations

import lzma
import os
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from vmimages import initrd as builder
from vmimages import kernel
from vmimages.errors import BuildError
from vmimages.initrd import initrd, program, version
from vmimages.rootfs import Base

from vhpc_slurm import __version__
from vhpc_slurm.architecture import X86_64
from vhpc_slurm.bootfiles import elf
from vhpc_slurm.bootfiles.newc import Archive

EPOCH = 1700000000


def need(tool: str) -> str:
    path = shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    if path is None:
        pytest.skip(f"{tool} is not installed")
    return path


# --- archive ----------------------------------------------------------------


def archive() -> Archive:
    made = Archive(mtime=EPOCH)
    made.file("/modules/b.ko", b"x" * 4097)
    made.file("init", b"#!", 0o755)
    made.file("empty", b"")
    made.character_device("dev/console", 5, 1)
    made.directory("proc", 0o555)
    return made


def test_bsdtar_reads_the_archive_as_it_was_meant(tmp_path: Path) -> None:
    need("bsdtar")
    path = tmp_path / "initrd"
    path.write_bytes(archive().to_bytes())
    listing = subprocess.run(
        ["bsdtar", "-tvnf", path],
        capture_output=True,
        text=True,
        check=True,
        env={"TZ": "UTC", "PATH": "/usr/bin"},
    ).stdout
    seen = [(line.split()[0], line.split()[4], line.split()[-1]) for line in listing.splitlines()]
    assert seen == [
        ("drwxr-xr-x", "0", "dev"),
        ("crw-------", "5,1", "dev/console"),
        ("-rw-r--r--", "0", "empty"),
        ("-rwxr-xr-x", "2", "init"),
        ("drwxr-xr-x", "0", "modules"),
        ("-rw-r--r--", "4097", "modules/b.ko"),
        ("dr-xr-xr-x", "0", "proc"),
    ]
    assert all(line.split()[2:4] == ["0", "0"] for line in listing.splitlines())
    assert "Nov 14  2023" in listing  # date -u -d @1700000000


def test_cpio_unpacks_the_packed_files(tmp_path: Path) -> None:
    need("cpio")
    data = os.urandom(100_001)
    made = Archive()
    made.file("deep/er/file", data)
    subprocess.run(["cpio", "-idm", "--quiet"], input=made.to_bytes(), cwd=tmp_path, check=True)
    assert (tmp_path / "deep/er/file").read_bytes() == data


def test_order_of_filling_does_not_show() -> None:
    one, two = Archive(), Archive()
    one.file("a", b"1")
    one.file("b/c", b"2")
    two.file("b/c", b"2")
    two.file("a", b"1")
    assert one.to_bytes() == two.to_bytes()
    assert len(one.to_bytes()) % 512 == 0


@pytest.mark.parametrize("path", ["", "/", "../x", "a/../../x", "a\0b"])
def test_paths_outside_the_archive_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not a valid path in"):
        Archive().file(path, b"")


def test_a_path_cannot_be_filled_twice() -> None:
    made = Archive()
    made.file("a", b"")
    with pytest.raises(ValueError, match="twice"):
        made.file("/a", b"")


# --- kernel and programs ----------------------------------------------------


def elf_file(notes: bytes = b"", interpreter: bool = False) -> bytes:
    """An ELF file by hand: header, one or two program headers, the notes."""
    headers = [(4, 64 + 56 * 2, len(notes))] + [(3, 0, 0)] * interpreter
    head = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, 0, 64, 0, 0, 64, 56, len(headers), 0, 0, 0)
    )
    table = b"".join(struct.pack("<IIQQQQQQ", kind, 4, at, 0, 0, size, size, 4) for kind, at, size in headers)
    return head + table.ljust(56 * 2, b"\0") + notes


def note(owner: bytes, kind: int, value: bytes) -> bytes:
    pad = -len(owner) % 4
    return (
        struct.pack("<III", len(owner), len(value), kind)
        + owner
        + bytes(pad)
        + value
        + bytes(-len(value) % 4)
    )


# Linux first, as in a real kernel; then Xen's PHYS32_ENTRY.
PVH = elf_file(note(b"Linux\0", 257, b"\0" * 4) + note(b"Xen\0", 18, b"\0" * 8))
NO_PVH = elf_file(note(b"Xen\0", 6, b"linux\0"))


def bzimage(payload: bytes) -> bytes:
    """A bzImage by boot.rst: 2 setup sectors, then 16 bytes of decompressor, then the payload."""
    data = bytearray(3 * 512 + 16) + payload
    data[0x1F1] = 2
    data[0x202:0x208] = b"HdrS\x0f\x02"
    struct.pack_into("<II", data, 0x248, 16, len(payload))
    return bytes(data)


def compressed(how: str, data: bytes) -> bytes:
    size = struct.pack("<I", len(data))
    if how == "xz":
        return lzma.compress(data, check=lzma.CHECK_CRC32) + size
    if how == "gzip":
        packer = zlib.compressobj(wbits=31)
        return packer.compress(data) + packer.flush()
    flags = {"zstd": ["-q", "-c"], "lz4": ["-l", "-q", "-c"]}[how]
    return subprocess.run([need(how), *flags], input=data, capture_output=True, check=True).stdout + size


@pytest.mark.parametrize("how", ["xz", "gzip", "zstd", "lz4"])
def test_the_kernel_comes_out_of_its_bzimage(how: str) -> None:
    assert kernel.vmlinux(bzimage(compressed(how, PVH))) == PVH


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (b"", "not a bzImage"),
        (bytes(4096), "not a bzImage"),
        (bzimage(b"BZh9 and more"), "unknown compression 425a6839"),
        (bzimage(compressed("gzip", NO_PVH)), "PVH"),
        (bzimage(compressed("gzip", b"no ELF")), "not a 64-bit ELF"),
    ],
)
def test_a_kernel_that_qemu_could_not_start_is_refused(image: bytes, why: str) -> None:
    with pytest.raises(BuildError, match=why):
        kernel.vmlinux(image)


def test_a_dynamic_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="linked dynamically"):
        program("vhpc-agent", Path("/usr/bin/cpio") if Path("/usr/bin/cpio").exists() else Path("/bin/true"))
    script = tmp_path / "agent"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(BuildError, match="not a 64-bit ELF"):
        program("vhpc-agent", script)
    with pytest.raises(BuildError, match="cannot read vhpc-init"):
        program("vhpc-init", tmp_path / "absent")


def test_programs_that_make_demo_has_built_are_found(
    standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "SOURCE_TREE", tmp_path)
    monkeypatch.setattr(builder, "INSTALLED", tmp_path / "none")
    # where scripts/publish-image, which `make demo` runs, has CMake put them
    for place in ("build/lab/programs/guest/vhpc-agent", "build/lab/programs/guest/init/vhpc-init"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(standin, tmp_path / place)
        assert program(Path(place).name, None) == tmp_path / place


def test_the_message_has_a_command_that_builds_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "SOURCE_TREE", tmp_path)
    monkeypatch.setattr(builder, "INSTALLED", tmp_path / "none")
    with pytest.raises(BuildError, match=r"install vhpc-image-tools, or .* --init"):
        program("vhpc-init", None)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(x LANGUAGES NONE)\n"
        "file(WRITE ${CMAKE_BINARY_DIR}/guest/init/vhpc-init built)\n"
    )
    with pytest.raises(BuildError) as refused:
        program("vhpc-init", None)
    need("cmake")
    command = refused.value.hint.removeprefix("run: ").partition(";")[0]
    subprocess.run(["sh", "-c", command], check=True, capture_output=True, timeout=60)
    with pytest.raises(BuildError, match=f"{tmp_path}/build/guest/init/vhpc-init cannot be vhpc-init"):
        program("vhpc-init", None)


def test_truncated_elf_files_are_refused() -> None:
    for length in (0, 6, 63, 100):
        with pytest.raises(ValueError, match=r"ELF|truncated"):
            elf.check_static(PVH[:length], X86_64)


def test_a_program_is_made_absolute_and_must_be_executable(
    standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(standin.parent)
    assert program("vhpc-agent", Path(standin.name)) == standin
    plain = tmp_path / "agent"
    plain.write_bytes(standin.read_bytes())  # not executable by any user: that stops root too
    with pytest.raises(BuildError, match="not executable"):
        program("vhpc-agent", plain)


def test_a_static_program_says_its_version(standin: Path, init: Path) -> None:
    assert version(program("vhpc-agent", standin)) == "0.0.1"
    assert version(program("vhpc-init", init)) == __version__


def test_the_initrd_holds_init_agent_and_modules(tmp_path: Path, standin: Path, init: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/load").write_text("a.ko\n-b.ko\n")
    (tmp_path / "modules/a.ko").write_bytes(b"module a")
    made = Base(tmp_path, "6.12", cached=True, verity={"root_hash": "0" * 64})
    data = initrd(made, init, standin, EPOCH)
    names = subprocess.run(
        [need("cpio"), "-t", "--quiet"], input=data, capture_output=True, check=True
    ).stdout.decode()
    assert names.split() == [
        "dev",
        "dev/console",
        "init",
        "modules",
        "modules/a.ko",
        "modules/load",
        "vhpc-agent",
    ]
    assert data == initrd(made, init, standin, EPOCH)
