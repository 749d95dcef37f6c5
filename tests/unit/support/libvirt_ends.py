# SPDX-License-Identifier: Apache-2.0
"""libvirt's ends of the FIFOs of a checkpoint: it opens the path twice, for a save and for a restore."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

from vhpc_slurm.errors import NodeError

NAME, UUID = "vhpc-42-0-0123abcd-g0", "11111111-2222-3333-4444-555555555555"
XML = f"<domain type='kvm' id='7'>\n  <name>{NAME}</name>\n  <uuid>{UUID}</uuid>\n  <x>é</x>\n</domain>\n"
NEW_XML = (
    "<domain><name>vhpc-43-0-ffffffff-g0</name><uuid>99999999-2222-3333-4444-555555555555</uuid></domain>"
)
COOKIE = b"<qemusave><cpu/></qemusave>"
PADDED = 4096


def header(magic: bytes = b"LibvirtQemudSave", xml: str = XML, *, ran: int = 0, version: int = 2) -> bytes:
    """As libvirt writes it; 92 bytes."""
    numbers = struct.pack("=5I", version, PADDED, ran, 0, len(xml.encode()) + 1)
    return magic + numbers + bytes(56)


def state(size: int, xml: str = XML) -> bytes:
    """A saved guest whose header is not final yet."""
    part = xml.encode() + b"\0" + COOKIE + b"\0"
    return header(b"LibvirtQemudPart", xml) + part.ljust(PADDED, b"\0") + random.Random(size).randbytes(size)


def failed(err: OSError) -> NodeError:
    return NodeError("cannot save the guest", f"libvirt: {err}")


def snapshot(path: str, data: bytes, final: bytes, part: int = 1 << 17) -> None:
    """As libvirt's snapshot: all, and then the final header."""
    try:
        for piece in (data, final):
            with Path(path).open("wb", buffering=0) as file:
                for begin in range(0, len(piece), part):
                    left = piece[begin : begin + part]
                    while left:
                        left = left[file.write(left) :]
    except OSError as err:
        raise failed(err) from err


class Restored:
    """As libvirt's restore: the head, and then everything."""

    def __init__(self, probes: int = 0, most: int = 1 << 40) -> None:
        self.head = self.all = b""
        self._probes, self._most = probes, most

    def load(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            self.head = self._exactly(fd, 92)
            (length,) = struct.unpack_from("=I", self.head, 20) if len(self.head) == 92 else (0,)
            self.head += self._exactly(fd, length)
        finally:
            os.close(fd)
        for probe in range(self._probes + 1):
            fd = os.open(path, os.O_RDONLY)
            try:
                self.all = self._exactly(fd, self._most if probe == self._probes else 1000)
            finally:
                os.close(fd)
        if len(self.all) < 92 + PADDED:
            raise NodeError("cannot restore the guest", "libvirt: its state is too short")

    @staticmethod
    def _exactly(fd: int, length: int) -> bytes:
        parts = b""
        while len(parts) < length and (part := os.read(fd, min(1 << 20, length - len(parts)))):
            parts += part
        return parts
