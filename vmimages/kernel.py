# SPDX-License-Identifier: Apache-2.0
"""Extracts the ELF kernel from a bzImage, because QEMU starts it faster.

A bzImage decompresses itself in the guest; under software emulation this takes
most of a second in each boot.  The ELF kernel inside starts at once through its
PVH entry point.  The disadvantage: the decompressor also randomizes the
kernel's base address (KASLR), so a recipe may request the bzImage.

Format: Linux Documentation/arch/x86/boot.rst.
"""

from __future__ import annotations

import lzma
import struct
import zlib

from vhpc_slurm.bootfiles import elf
from vmimages.errors import BuildError
from vmimages.host import need, output

HEADER_MAGIC = b"HdrS"
PAYLOAD_PROTOCOL = 0x0208  # first boot protocol with payload_offset


def vmlinux(bzimage: bytes) -> bytes:
    """The ELF kernel inside a bzImage.

    Raises:
        BuildError: not a bzImage, an unknown compression, or a kernel without
            a PVH entry point.
    """
    hint = 'set kernel.format = "bzImage" in the recipe'
    payload = _payload(bzimage)
    image = _decompress(payload)
    if image is None:
        raise BuildError(
            "cannot extract the kernel from its bzImage", f"unknown compression {payload[:4].hex()}", hint
        )
    try:
        if not elf.has_pvh_entry(image):
            raise BuildError("the kernel has no PVH entry point", "it was built without CONFIG_PVH", hint)
    except ValueError as err:
        raise BuildError("cannot extract the kernel from its bzImage", str(err), hint) from err
    return image


def _payload(bzimage: bytes) -> bytes:
    if len(bzimage) < 0x250 or bzimage[0x202:0x206] != HEADER_MAGIC:
        raise BuildError("the kernel is not a bzImage")
    (protocol,) = struct.unpack_from("<H", bzimage, 0x206)
    if protocol < PAYLOAD_PROTOCOL:
        raise BuildError("the kernel is too old", f"boot protocol {protocol:#06x}")
    setup_sectors = bzimage[0x1F1] or 4
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    return bzimage[start : start + length]


def _decompress(payload: bytes) -> bytes | None:
    """None for an unknown compression.  All but gzip have the size in 4 bytes after the data."""
    if payload.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(payload)
    if payload.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(wbits=31).decompress(payload)
    if payload.startswith(b"\x28\xb5\x2f\xfd"):
        need("zstd")
        return output(["zstd", "-dc"], stdin=payload[:-4])
    if payload.startswith(b"\x02\x21\x4c\x18"):
        need("lz4")
        return output(["lz4", "-dc"], stdin=payload[:-4])
    return payload if payload.startswith(b"\x7fELF") else None
