# SPDX-License-Identifier: Apache-2.0
"""Kernels of Arm systems in the forms of distributions, by the kernel's own description of the headers."""

from __future__ import annotations

import gzip
import lzma
import shutil
import struct
import subprocess

import pytest

from vhpc_slurm.bootfiles import armkernel
from vhpc_slurm.bootfiles.errors import BootFileError

# booting.rst: code0, code1, text_offset, image_size, flags (4 KiB pages), three reserved, magic, PE offset.
HEAD = struct.pack("<2sHI5Q8x4sI", b"MZ", 0xFA40, 0x1462803B, 0, 0x1E80000, 0x0A, 0, 0, b"ARM\x64", 64)
KERNEL = HEAD + bytes(range(256)) * 64


def zboot(payload: bytes, method: bytes) -> bytes:
    """zboot-header.S: MZ, zimg, offset and size of the payload, two reserved, method, at 0x38 PE's magic."""
    head = struct.pack("<2s2x4sII8x32sII", b"MZ", b"zimg", 64, len(payload), method, 0x818223CD, 64)
    assert len(head) == 64
    return head + payload + b"\0\0\x1e\0"


def packed(name: str) -> bytes:
    if name == "zboot zstd":
        if shutil.which("zstd") is None:
            pytest.skip("zstd is not installed: make deps")
        made = subprocess.run(["zstd", "-cq"], input=KERNEL, capture_output=True, check=True).stdout
        return zboot(made, b"zstd22")
    return {
        "Image": KERNEL,
        "Image.gz": gzip.compress(KERNEL),
        "zboot gzip": zboot(gzip.compress(KERNEL), b"gzip"),
        "zboot xz": zboot(lzma.compress(KERNEL), b"xzkern"),
    }[name]


@pytest.mark.parametrize("name", ["Image", "Image.gz", "zboot gzip", "zboot xz", "zboot zstd"])
def test_kernels_of_all_packings_become_the_image(name: str) -> None:
    assert len(HEAD) == 64
    assert armkernel.image(packed(name)) == KERNEL


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a kernel for aarch64"),
        (bytes(0x202) + b"HdrS" + bytes(512), "not a kernel for aarch64"),
        (KERNEL[:24] + b"\x0b" + KERNEL[25:], "big-endian"),
        (gzip.compress(KERNEL)[:-9], "damaged"),
        (b"\x1f\x8b" + bytes(20), "cannot be unpacked"),
        (zboot(b"x", b"lz4"), "unknown method 'lz4'"),
        (zboot(KERNEL, b"gzip"), "cannot be unpacked"),
        (zboot(gzip.compress(KERNEL), b"gzip")[:80], "truncated"),
        (b"MZ\0\0zimg", "truncated"),
    ],
    # the same in each process: compressed data has the time in it
    ids=[
        *("empty", "other-kernel", "big-endian", "cut-gzip", "bad-gzip"),
        *("lz4", "not-gzip", "cut-zboot", "cut-header"),
    ],
)
def test_other_files_are_refused_with_the_reason(data: bytes, words: str) -> None:
    with pytest.raises(BootFileError, match=words):
        armkernel.image(data)


def test_a_kernel_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(armkernel, "LIMIT", 4096)
    for name in ("Image.gz", "zboot gzip", "zboot xz"):
        with pytest.raises(BootFileError, match="too large"):
            armkernel.image(packed(name))
