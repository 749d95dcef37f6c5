# SPDX-License-Identifier: Apache-2.0
"""The head of libvirt's format of a saved guest: its header, and the XML of the domain.

Source: ``virQEMUSaveHeader`` of libvirt, ``src/qemu/qemu_saveimage.h``, version 2: 16 bytes of magic, then
numbers of 32 bits in the byte order of the host: version, length of the XML part, whether the guest ran,
compression, offset of the cookie in the XML part, 14 unused ones.  The XML part has the XML, a NUL, the
cookie, a NUL, and padding; QEMU's stream follows.
"""

from __future__ import annotations

import re
import struct
import xml.etree.ElementTree as ET

from vhpc_slurm.record import Record

UNFINISHED, MAGIC = b"LibvirtQemudPart", b"LibvirtQemudSave"
_HEADER = struct.Struct("=16sIIIII56x")
HEADER_BYTES = _HEADER.size
VERSION = 2
XML_MOST = 2 << 20
"""Longest XML part; those of guests have some 20 KiB."""
_NAME = re.compile(rb"<name>[^<]*</name>")
_UUID = re.compile(rb"<uuid>[^<]*</uuid>")


class HeadError(Exception):
    """The head is not one that this version can use; the text says why."""


class Head(Record, frozen=True):
    """The head of a saved guest.

    Attributes:
        version, ran, compression: as libvirt wrote them.
        xml: of the domain.
        cookie: further data of libvirt; empty if there are none.
        length: bytes of the XML part with its padding.
    """

    version: int
    ran: int
    compression: int
    xml: bytes
    cookie: bytes
    length: int

    @property
    def size(self) -> int:
        """Bytes of the head: QEMU's stream begins there."""
        return HEADER_BYTES + self.length

    def renamed(self, name: str, uuid: str) -> Head:
        """The head of the same guest with the name and uuid of the new domain: libvirt compares them.

        Raises:
            HeadError: the XML has no name or no uuid.
        """
        begin, _, rest = self.xml.partition(b"</uuid>")
        begin += b"</uuid>"
        for pattern, tag, text in ((_NAME, "name", name), (_UUID, "uuid", uuid)):
            found = pattern.search(begin)
            if found is None:
                raise HeadError(f"its XML has no {tag}")
            element = ET.Element(tag)
            element.text = text
            begin = begin[: found.start()] + ET.tostring(element) + begin[found.end() :]
        xml = begin + rest
        needed = len(xml) + 1 + (len(self.cookie) + 1 if self.cookie else 0)
        return Head(self.version, self.ran, self.compression, xml, self.cookie, max(self.length, needed))

    def packed(self) -> bytes:
        """Its bytes."""
        at = len(self.xml) + 1 if self.cookie else 0
        part = self.xml + b"\0" + (self.cookie + b"\0" if self.cookie else b"")
        header = _HEADER.pack(MAGIC, self.version, self.length, self.ran, self.compression, at)
        return header + part.ljust(self.length, b"\0")


def check_header(header: bytes) -> None:
    """See that these are the bytes with which libvirt completes a saved guest.

    Raises:
        HeadError: they are not.
    """
    if len(header) != HEADER_BYTES:
        raise HeadError(f"its header has {len(header)} bytes")
    _unpack(header)


def parse(begin: bytes) -> Head:
    """The head of a saved guest, from the first bytes of its file.

    Raises:
        HeadError: it is not complete, or of another version of libvirt.
    """
    version, length, ran, compression, at = _unpack(begin)
    part = begin[HEADER_BYTES : HEADER_BYTES + length]
    if len(part) < length:
        raise HeadError("it is shorter than its XML")
    xml, end, _ = part.partition(b"\0")
    cookie = part[at:].partition(b"\0")[0] if at else b""
    if not end or (at and (at <= len(xml) or at >= length)):
        raise HeadError("its XML is cut off")
    return Head(version, ran, compression, xml, cookie, length)


def _unpack(begin: bytes) -> tuple[int, int, int, int, int]:
    if len(begin) < HEADER_BYTES:
        raise HeadError(f"it has {len(begin)} bytes")
    magic, version, length, ran, compression, at = _HEADER.unpack_from(begin)
    if magic != MAGIC:
        raise HeadError("libvirt has not completed it" if magic == UNFINISHED else "it is not libvirt's")
    if version != VERSION:
        raise HeadError(f"its format has version {version}, and this vhpc reads version {VERSION}")
    if compression:
        raise HeadError("it is compressed")
    if length > XML_MOST:
        raise HeadError(f"its XML has {length} bytes")
    return version, length, ran, compression, at
