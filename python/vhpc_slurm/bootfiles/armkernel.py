# SPDX-License-Identifier: Apache-2.0
"""The kernel of an Arm system as QEMU starts it without help: the file ``Image``.

Distributions pack it in three ways: not at all (Debian), with gzip, or in an EFI program that unpacks it
(zboot: Fedora, and RHEL from version 10). QEMU unpacks some of them, depending on its version, and each start
of a guest would pay for it.

Sources: Linux Documentation/arch/arm64/booting.rst, drivers/firmware/efi/libstub/zboot-header.S.
"""

from __future__ import annotations

import lzma
import shutil
import struct
import subprocess
import zlib
from typing import Protocol

from vhpc_slurm.bootfiles.errors import BootFileError

LIMIT = 512 << 20
"""Maximum bytes of a kernel."""
ZSTD_S = 120.0
GZIP = 31
"""zlib's number of this format."""
_MAGIC = slice(56, 60)
_BIG_ENDIAN = 1
_ZBOOT_HEAD = 64


class Unpacker(Protocol):
    """A decompressor of zlib or lzma."""

    @property
    def eof(self) -> bool:
        """True at the end of the data."""

    def decompress(self, data: bytes, most: int, /) -> bytes:
        """At most so many bytes."""


def image(data: bytes) -> bytes:
    """The ``Image`` of a kernel file.

    Raises:
        BootFileError: the file is not such a kernel, is packed in an unknown way, or is too large.
    """
    if data[:2] == b"\x1f\x8b":
        data = _unpack(zlib.decompressobj(wbits=GZIP), data)
    if data[:2] == b"MZ" and data[4:8] == b"zimg":
        data = _unpack_zboot(data)
    if data[_MAGIC] != b"ARM\x64":
        raise BootFileError("it is not a kernel for aarch64")
    (flags,) = struct.unpack_from("<Q", data, 24)
    if flags & _BIG_ENDIAN:
        raise BootFileError("it is a big-endian kernel")
    return data


def _unpack_zboot(data: bytes) -> bytes:
    if len(data) < _ZBOOT_HEAD:
        raise BootFileError("its header is truncated")
    offset, size = struct.unpack_from("<II", data, 8)
    method = data[24:56].partition(b"\0")[0].decode("ascii", "replace")
    payload = data[offset : offset + size]
    if len(payload) != size:
        raise BootFileError("its payload is truncated")
    if method == "gzip":
        return _unpack(zlib.decompressobj(wbits=GZIP), payload)
    if method in ("xzkern", "xz", "lzma"):
        return _unpack(lzma.LZMADecompressor(), payload)
    if method in ("zstd", "zstd22"):
        return _unzstd(payload)
    raise BootFileError("it cannot be unpacked", f"unknown method {method[:16]!r}")


def _unpack(unpacker: Unpacker, data: bytes) -> bytes:
    try:
        found = unpacker.decompress(data, LIMIT + 1)
    except (zlib.error, lzma.LZMAError) as err:
        raise BootFileError("it cannot be unpacked", str(err)) from err
    return _whole(found, done=unpacker.eof)


def _unzstd(data: bytes) -> bytes:
    program = shutil.which("zstd")
    if program is None:
        raise BootFileError("it cannot be unpacked", "zstd is not installed")
    argv = [program, "-dcq", "--memory=512MB"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        try:
            found, _ = run.communicate(data, ZSTD_S)
        except subprocess.TimeoutExpired as err:
            run.kill()
            raise BootFileError("it cannot be unpacked", f"zstd did not end within {ZSTD_S:.0f} s") from err
    return _whole(found, done=run.returncode == 0)


def _whole(found: bytes, *, done: bool) -> bytes:
    if len(found) > LIMIT:
        raise BootFileError("it is too large", f"a kernel has at most {LIMIT >> 20} MiB")
    if not done:
        raise BootFileError("it cannot be unpacked", "its data are damaged")
    return found
