# SPDX-License-Identifier: Apache-2.0
"""Reads the parts of ELF files (64-bit, little endian) that matter for an image."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from vhpc_slurm.architecture import X86_64, Architecture

PT_INTERP = 3
PT_NOTE = 4
# xen/interface/elfnote.h: entry point of a PVH boot, which QEMU needs in an ELF kernel.
XEN_ELFNOTE_PHYS32_ENTRY = 18


def _program_headers(data: bytes, architecture: Architecture) -> Iterator[tuple[int, int, int]]:
    """(type, file offset, file size) of each program header; ValueError if data is not such an ELF file."""
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
        raise ValueError("it is not a 64-bit ELF file")
    if struct.unpack_from("<H", data, 18)[0] != architecture.elf_machine:
        raise ValueError(f"it is not for {architecture.name}")
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    if size < 56 or table + size * count > len(data):
        raise ValueError("its program headers are truncated")
    for index in range(count):
        kind, _flags, offset, _virtual, _physical, length = struct.unpack_from(
            "<IIQQQQ", data, table + index * size
        )
        yield kind, offset, length


def check_static(data: bytes, architecture: Architecture) -> None:
    """Check that a program is static and for an architecture; otherwise ValueError with the reason."""
    if any(kind == PT_INTERP for kind, _offset, _length in _program_headers(data, architecture)):
        raise ValueError("it is linked dynamically, but an initrd has no libraries")


def has_pvh_entry(data: bytes) -> bool:
    """Whether QEMU can start an ELF kernel for x86-64 directly; ValueError if it is not an ELF file."""
    for kind, offset, length in _program_headers(data, X86_64):
        if kind != PT_NOTE:
            continue
        at, end = offset, min(offset + length, len(data))
        while at + 12 <= end:
            name_size, value_size, note = struct.unpack_from("<III", data, at)
            name = data[at + 12 : at + 12 + name_size]
            if note == XEN_ELFNOTE_PHYS32_ENTRY and name.rstrip(b"\0") == b"Xen":
                return True
            at += 12 + (name_size + 3) // 4 * 4 + (value_size + 3) // 4 * 4
    return False


def section(data: bytes, name: str) -> bytes:
    """Bytes of a section, empty if the file has none of that name; ValueError if it is not an ELF file."""
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
        raise ValueError("it is not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, strings = struct.unpack_from("<HHH", data, 58)
    if size < 64 or strings >= count or table + size * count > len(data):
        raise ValueError("its section headers are truncated")
    headers = [struct.unpack_from("<IIQQQQ", data, table + index * size) for index in range(count)]
    names = data[headers[strings][4] : headers[strings][4] + headers[strings][5]]
    for header in headers:
        if names[header[0] :].partition(b"\0")[0] == name.encode():
            return data[header[4] : header[4] + header[5]]
    return b""
