# SPDX-License-Identifier: Apache-2.0
"""Restoring a guest: its sealed files become its disk, and the state that libvirt starts it with."""

from __future__ import annotations

import os
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vhpc_slurm.domain.spec import format_version
from vhpc_slurm.errors import NodeError, UserError, VhpcError
from vhpc_slurm.model import GuestPlan, Resume, SavedGuest, SavedNode
from vhpc_slurm.node.checkpoint import folder, image
from vhpc_slurm.node.checkpoint.fifo import Fifos, StoppedError
from vhpc_slurm.node.checkpoint.folder import Names
from vhpc_slurm.node.checkpoint.save import DISK_HEAD, DISK_MAGIC, DISK_RANGE
from vhpc_slurm.node.checkpoint.seal import BrokenSealError, SealKey
from vhpc_slurm.node.checkpoint.stream import SealedReader

GRACE_S = 10.0
"""After libvirt's success all of the state has been read."""
SLOWEST = 20 << 20
"""Bytes per second that are restored at least; else a restore has hung."""


def check(saved: SavedNode, node: str, guests: Sequence[GuestPlan], cpu: str, qemu: int) -> None:
    """See that this node can continue what another one has saved.

    Args:
        saved: what was saved.
        node: this node.
        guests: their plans here.
        cpu: the CPU that guests see here (``SavedNode.cpu``).
        qemu: version of QEMU here.

    Raises:
        UserError: QEMU is older, or the CPU or the guests are others; it names both sides.
    """

    def refuse(what: str, there: object, here: object) -> UserError:
        return UserError(
            f"the checkpoint cannot be resumed on {node}",
            f"{what}: {there} on {saved.node}, which saved it, {here} on {node}",
            "ask for nodes like those of the first job, with --constraint or --nodelist",
        )

    if qemu < saved.qemu:
        raise refuse("QEMU is older", format_version(saved.qemu), format_version(qemu))
    if cpu != saved.cpu:
        raise refuse("the CPU is another one", saved.cpu, cpu)
    if len(guests) != len(saved.guests):
        raise refuse("the number of guests is another one", len(saved.guests), len(guests))
    for was, now in zip(saved.guests, guests, strict=True):
        if len(now.pins) != was.vcpus:
            raise refuse(
                f"the number of CPUs of guest {was.hostname} is another one", was.vcpus, len(now.pins)
            )
        if now.memory_mib != was.memory_mib:
            what = f"the memory of guest {was.hostname} is another one"
            raise refuse(what, f"{was.memory_mib} MiB", f"{now.memory_mib} MiB")
        if (now.disk_mib > 0) != (was.disk is not None):
            there, here = ("none" if no else "one" for no in (was.disk is None, now.disk_mib == 0))
            raise refuse(f"the disk of guest {was.hostname}", there, here)


def timeout_s(saved: SavedGuest) -> float:
    """Longest time to restore a guest's memory, beside the start of its QEMU."""
    return saved.state.size / SLOWEST


def restore_disk(root: Path, resume: Resume, saved: SavedGuest, disk: Path) -> None:
    """Write the content of a guest's disk into its new file, which reads as zeros.

    Raises:
        UserError: the checkpoint is damaged or not there.
        NodeError: the folder of checkpoints cannot be used here, or the disk cannot be written.
    """
    if saved.disk is None:
        return
    key = SealKey(resume.key, resume.serial, Names(saved.rank).disk, saved.disk.encrypted)
    with folder.found(root, resume.serial) as place, SealedReader(place, key, saved.disk) as reader:
        try:
            fd = os.open(disk, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _write_ranges(fd, _Stream(reader.chunks(), key), key)
            finally:
                os.close(fd)
        except OSError as err:
            raise NodeError(f"cannot write {disk}", str(err)) from err


class _Stream:
    """Bytes of a file in pieces of any length."""

    def __init__(self, chunks: Iterator[bytes], key: SealKey) -> None:
        self._chunks, self._key = chunks, key
        self._left = memoryview(b"")

    def some(self, most: int) -> memoryview:
        """The next bytes, at least one."""
        if not self._left:
            self._left = memoryview(self._next())
        if not self._left:
            raise BrokenSealError(self._key, "its table of ranges is wrong")
        given, self._left = self._left[:most], self._left[most:]
        return given

    def exactly(self, length: int) -> bytes:
        """So many bytes."""
        parts = bytearray()
        while len(parts) < length:
            parts += self.some(length - len(parts))
        return bytes(parts)

    def end(self) -> None:
        """See that there is nothing more: only then the whole file is proven."""
        if self._left or self._next():
            raise BrokenSealError(self._key, "its table of ranges is wrong")

    def _next(self) -> bytes:
        return next(self._chunks, b"")


def _write_ranges(fd: int, stream: _Stream, key: SealKey) -> None:
    magic, size, count = DISK_HEAD.unpack(stream.exactly(DISK_HEAD.size))
    there = os.fstat(fd).st_size
    if magic != DISK_MAGIC or size != there:
        raise BrokenSealError(key, f"it is of a disk of {size} bytes, and the guest has one of {there}")
    ranges = [DISK_RANGE.unpack(stream.exactly(DISK_RANGE.size)) for _ in range(count)]
    for begin, length in ranges:
        if begin + length > size:
            raise BrokenSealError(key, "its table of ranges is wrong")
        at, end = begin, begin + length
        while at < end:
            data = stream.some(end - at)
            while data:
                done = os.pwrite(fd, data, at)
                at, data = at + done, data[done:]
    stream.end()


def restore_state(
    root: Path, resume: Resume, saved: SavedGuest, fifo: Path, xml: str, load: Callable[[str], None]
) -> None:
    """Have a domain started with the saved memory and devices of a guest.

    Args:
        root: the folder of checkpoints.
        resume: the checkpoint.
        saved: the guest.
        fifo: a path at which FIFOs can be made.
        xml: the new domain; the saved head gets its name and its uuid.
        load: has libvirt read from that path.

    Raises:
        UserError: the checkpoint is damaged or not there.
        NodeError: the folder of checkpoints cannot be used here; and what ``load`` raises.
    """
    key = SealKey(resume.key, resume.serial, Names(saved.rank).state, saved.state.encrypted)
    with folder.found(root, resume.serial) as place, SealedReader(place, key, saved.state) as reader:
        try:
            fifos = Fifos(fifo)
        except OSError as err:
            raise NodeError(f"cannot make {fifo}", str(err)) from err
        feeder = _Feeder(fifos, reader, key, xml)
        try:
            feeder.start()
            try:
                load(str(fifo))
                feeder.complete.wait(GRACE_S)
            except VhpcError as err:
                fifos.stop(feeder)
                raise feeder.failure() or err from err
            finally:
                fifos.stop(feeder)
            if error := feeder.failure():
                raise error
        finally:
            fifos.remove()


class _Feeder(threading.Thread):
    """Gives libvirt the head at its first opening, and everything at each further one."""

    def __init__(self, fifos: Fifos, reader: SealedReader, key: SealKey, xml: str) -> None:
        super().__init__(name="feed", daemon=True)
        self._fifos, self._reader, self._key, self._xml = fifos, reader, key, xml
        self.complete = threading.Event()
        self._error: Exception | None = None

    def failure(self) -> Exception | None:
        """Why it has not given everything that libvirt wanted; None if it has, or if libvirt left."""
        if isinstance(self._error, StoppedError):
            return None
        if isinstance(self._error, OSError):
            return NodeError(f"cannot feed {self._fifos.path} to libvirt", str(self._error))
        return self._error

    def run(self) -> None:
        try:
            parts = self._parts()
            head = next(parts)
            with self._fifos.opened(os.O_WRONLY) as fd:
                self._give(fd, iter([head]))
            while True:
                with self._fifos.opened(os.O_WRONLY) as fd:
                    if self._give(fd, self._parts()):
                        self.complete.set()
        except Exception as err:
            self._error = err
            self.complete.set()
            self._fifos.refuse()

    def _give(self, fd: int, parts: Iterator[bytes]) -> bool:
        """Whether the reader took all."""
        try:
            for part in parts:
                self._fifos.write(fd, part)
        except BrokenPipeError:
            return False
        return True

    def _parts(self) -> Iterator[bytes]:
        """The head with the new names, and then the rest of the state."""
        chunks = self._reader.chunks()
        first = next(chunks, b"")
        try:
            old = image.parse(first)
            yield old.renamed(*_names(self._xml)).packed()
        except image.HeadError as err:
            raise BrokenSealError(self._key, str(err)) from err
        yield first[old.size :]
        yield from chunks


def _names(xml: str) -> tuple[str, str]:
    """Name and uuid of a domain."""
    domain = ET.fromstring(xml)  # noqa: S314 - made by vhpc
    return domain.findtext("name") or "", domain.findtext("uuid") or ""
