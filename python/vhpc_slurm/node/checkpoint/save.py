# SPDX-License-Identifier: Apache-2.0
"""Saving a guest that is held and suspended: its memory and its disk become sealed files.

The file of a disk has a head, a table of the ranges with data, and these ranges. The head is ``vhpcdsk1``,
the size of the disk, and the number of ranges; a row of the table is the offset of a range and its length;
all numbers have 64 bits, little endian. Bytes outside of the ranges read as zeros.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.model import Seal
from vhpc_slurm.node.checkpoint import image
from vhpc_slurm.node.checkpoint.fifo import Fifos, StoppedError
from vhpc_slurm.node.checkpoint.folder import Folder
from vhpc_slurm.node.checkpoint.seal import SealKey
from vhpc_slurm.node.checkpoint.stream import SealedWriter

DISK_MAGIC = b"vhpcdsk1"
DISK_HEAD = struct.Struct("<8sQQ")
DISK_RANGE = struct.Struct("<QQ")
GAP = 1 << 20
"""Ranges with less between them are one: so a disk has at most one for each MiB."""
GRACE_S = 10.0
"""After libvirt's success its last bytes are in the FIFO."""


class _Receiver(threading.Thread):
    """Writes what libvirt sends: everything, then the final header, which replaces the first bytes."""

    def __init__(self, fifos: Fifos, writer: SealedWriter) -> None:
        super().__init__(name="receive", daemon=True)
        self._fifos, self._writer = fifos, writer
        self.header = bytearray()
        self.error: Exception | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            with self._fifos.opened(os.O_RDONLY) as fd:
                self._receive_all(fd)
            with self._fifos.opened(os.O_RDONLY) as fd:
                self._receive_header(fd)
        except Exception as err:
            self.error = err
            self.done.set()
            self._fifos.refuse()
        self.done.set()

    def _receive_all(self, fd: int) -> None:
        while True:
            with self._writer.room() as room:
                count = self._fifos.read_into(fd, room)
            if count == 0:
                return
            self._writer.filled(count)

    def _receive_header(self, fd: int) -> None:
        part = bytearray(image.HEADER_BYTES + 1)
        while len(self.header) <= image.HEADER_BYTES:
            count = self._fifos.read_into(fd, memoryview(part))
            if count == 0:
                return
            self.header += part[:count]


def save_state(folder: Folder, key: SealKey, fifo: Path, snapshot: Callable[[str], None]) -> Seal:
    """Write the memory and the devices of a guest.

    Args:
        folder: of the checkpoint.
        key: of the file.
        fifo: a path at which FIFOs can be made.
        snapshot: has libvirt write to that path.

    Raises:
        NodeError: it cannot be written; nothing of it is left.
    """
    try:
        fifos = Fifos(fifo)
    except OSError as err:
        raise NodeError(f"cannot make {fifo}", str(err)) from err
    try:
        with SealedWriter(folder, key) as writer:
            receiver = _Receiver(fifos, writer)
            receiver.start()
            try:
                snapshot(str(fifo))
                receiver.done.wait(GRACE_S)
            except VhpcError as err:
                fifos.stop(receiver)
                if receiver.error is not None and not isinstance(receiver.error, StoppedError):
                    raise receiver.error from err
                raise
            finally:
                fifos.stop(receiver)
            if receiver.error is not None:
                raise receiver.error
            image.check_header(bytes(receiver.header))
            return writer.finish(bytes(receiver.header))
    except OSError as err:
        raise unwritable(folder, key, err) from err
    except (StoppedError, image.HeadError, ValueError) as err:
        why = f"what libvirt wrote is not a saved guest: {err}".removesuffix(": ")
        raise NodeError(f"cannot write {folder.path / key.file}", why, "see libvirt's log") from err
    finally:
        fifos.remove()


def save_disk(folder: Folder, key: SealKey, disk: Path) -> Seal:
    """Write the disk of a guest, without its holes.

    Raises:
        NodeError: it cannot be read or written; nothing of it is left.
    """
    try:
        fd = os.open(disk, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as err:
        raise NodeError(f"cannot read {disk}", str(err)) from err
    try:
        with SealedWriter(folder, key) as writer:
            ranges = list(data_ranges(fd))
            writer.write(DISK_HEAD.pack(DISK_MAGIC, os.fstat(fd).st_size, len(ranges)))
            for begin, end in ranges:
                writer.write(DISK_RANGE.pack(begin, end - begin))
            for begin, end in ranges:
                _copy(fd, begin, end, writer)
            return writer.finish()
    except OSError as err:
        raise unwritable(folder, key, err) from err
    finally:
        os.close(fd)


def data_ranges(fd: int) -> Iterator[tuple[int, int]]:
    """Ranges of a file that may have other bytes than zeros, each its begin and its end."""
    size, begin, end = os.fstat(fd).st_size, 0, 0
    while True:
        try:
            found = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as err:
            if err.errno != errno.ENXIO:
                raise
            break  # only a hole is left
        if found - end >= GAP and end > begin:
            yield begin, end
        if found - end >= GAP or end == begin:
            begin = found
        end = min(size, os.lseek(fd, found, os.SEEK_HOLE))
    if end > begin:
        yield begin, end


def _copy(fd: int, begin: int, end: int, writer: SealedWriter) -> None:
    while begin < end:
        with writer.room() as room, room[: end - begin] as wanted:
            count = os.preadv(fd, [wanted], begin)
        if count == 0:
            raise OSError(errno.EIO, "the disk has become shorter")
        writer.filled(count)
        begin += count


def unwritable(folder: Folder, key: SealKey, err: OSError) -> NodeError:
    """The error of a file of a checkpoint."""
    hint = "make space in checkpoint.folder: vhpc checkpoint rm" if err.errno == errno.ENOSPC else ""
    return NodeError(f"cannot write {folder.path / key.file}", err.strerror or str(err), hint)
