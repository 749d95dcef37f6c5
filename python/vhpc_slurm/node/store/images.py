# SPDX-License-Identifier: Apache-2.0
"""The node's store of images: copies by digest, verified while they are copied.

A blob is copied from other nodes of the lease or from the catalogue to a
temporary name, hashed meanwhile, and only then renamed to its digest: a file
named by a digest has that digest.  Concurrent copies of one blob wait for each other (flock).  A pin per
generation records that an image is in use, and its blobs.

The content of a catalogue is not trusted: only regular files with the size in
the manifest are read, and only if the store has room for them (``room``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

from vhpc_slurm import chunks, files
from vhpc_slurm.catalog import Owner, blobs, catalog_for, chunk_list
from vhpc_slurm.errors import FabricError, NodeError, UserError
from vhpc_slurm.model import Blob, ImageIdentity
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.node.store import blobsource
from vhpc_slurm.node.store.blobsource import Source
from vhpc_slurm.node.store.copying import BlobCopy, Tally
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.part import Part
from vhpc_slurm.node.store.peers import offers
from vhpc_slurm.node.store.peers.client import Lineage, Peers
from vhpc_slurm.node.store.room import Room, cannot_store
from vhpc_slurm.record import Record

log = logging.getLogger("vhpc")
CHECK_S = 2.0
RUN_FREE = 16 << 20
"""Bytes of paths.run that kernels and initrds leave free."""


class StagedImage(Record, frozen=True):
    """An image on this node: paths of root-owned, verified, read-only files.

    ``copied`` are the bytes that this call has copied; others were in the store, or another job copied them.
    ``sources`` says from where, also bytes that were of no use: ``catalogue``, ``kept`` for those that an
    interrupted copy had left, or a node.
    """

    kernel: Path
    initrd: Path
    root: Path
    copied: int = 0
    sources: tuple[tuple[str, int], ...] = ()


def stage(
    layout: Layout,
    image: ImageIdentity,
    account: Account | None = None,
    lineage: Lineage | None = None,
) -> Generator[None, None, StagedImage]:
    """Copy every blob of an image to the node, verified; a generator.

    Yields every ``CHECK_S`` seconds of a copy or of the wait for one; an exception
    that the caller throws in ends it.  Returns the staged image.

    Args:
        layout: has the paths of the catalogue and the store.
        image: the image; it must be pinned if a guest will use it.
        account: of the job's user, with whose rights an image of the user's own catalogue is read.
        lineage: the nodes of the lease to ask before the catalogue; None: none.

    Raises:
        UserError: a blob is missing, differs from the manifest, or is larger than the store:
            the image is broken, not the node.
        FabricError: the store has no room now, or the catalogue is too slow.
        NodeError: the node cannot store it.
    """
    manifest = image.manifest
    copies = _Copies(layout, image, account, Peers(lineage) if lineage else None)
    kernel = yield from copies.blob(manifest.kernel)
    initrd = yield from copies.blob(manifest.initrd)
    yield from copies.chunk_list(manifest.root)
    root = yield from copies.blob(manifest.root)
    return StagedImage(kernel, initrd, root, copies.copied, tuple(copies.tally.bytes.items()))


def private_copies(image: StagedImage, folder: Path) -> tuple[Path, Path]:
    """Copies of kernel and initrd for one guest, which exist until its QEMU has read them.

    libvirt changes the owner of both to the uid of the guest's QEMU, so other guests must not boot from
    the same files, and a hard link will not do.  Users choose their sizes: a folder that has no room for
    them is not the node's fault.

    Raises:
        UserError: they are larger than the folder's file system.
        FabricError: there is no room now.
        NodeError: they cannot be written.
    """
    kernel, initrd = folder / "kernel", folder / "initrd"
    try:
        size = image.kernel.stat().st_size + image.initrd.stat().st_size
        _check_room(folder, size)
        files.copy(image.kernel, kernel)
        files.copy(image.initrd, initrd)
    except OSError as err:
        kernel.unlink(missing_ok=True)
        if files.is_full(err):
            raise _no_room(size, folder, err.strerror or str(err)) from err
        raise NodeError(f"cannot write {folder}", str(err), "check the file system of paths.run") from err
    return kernel, initrd


def _check_room(folder: Path, size: int) -> None:
    """Leave some space for the journals and sockets of jobs, and for the host's daemons (/run)."""
    space = os.statvfs(folder)
    capacity, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    if size + RUN_FREE > capacity:
        raise UserError(
            "kernel and initrd of the image are too large for this node",
            f"they have {size >> 20} MiB, and the file system of {folder} {capacity >> 20} MiB",
            "use an image with a smaller initrd",
        )
    if size + RUN_FREE > free:
        raise _no_room(size, folder, f"{free >> 20} MiB are free")


def _no_room(size: int, folder: Path, why: str) -> FabricError:
    return FabricError(
        f"there is no room in {folder} for kernel and initrd of a guest ({size >> 20} MiB)",
        why,
        "it is tried again; other jobs need such space only until their guests have started",
    )


def is_stored(layout: Layout, image: ImageIdentity) -> bool:
    """Whether the store has all blobs of an image of the site."""
    return all(_complete(layout.blobs / blob.sha256, blob.size) for blob in blobs(image.manifest))


def stored(layout: Layout) -> list[tuple[str, int]]:
    """Blobs of the site's images on this node: (sha256, size in bytes)."""
    try:
        return sorted((p.name, p.stat().st_size) for p in layout.blobs.iterdir() if len(p.name) == 64)
    except FileNotFoundError:
        return []


def _complete(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


class _Copies:
    """Copies blobs of one image into the store."""

    def __init__(
        self, layout: Layout, image: ImageIdentity, account: Account | None, peers: Peers | None
    ) -> None:
        self._peers, self._hashes = peers, dict[str, bytes]()
        self._from_catalogue = set[str]()
        self.tally = Tally()
        self._layout, self._image = layout, str(image.ref)
        self.copied = 0
        self._account, owner = None, None
        if image.ref.own:
            assert account is not None, "an image of a user's own is read with that user's rights"
            self._account, owner = account, Owner(account.name, account.uid)
        self._catalog = catalog_for(layout.config.images, owner)
        self._folder = layout.blobs_of(owner.uid if owner else None)
        self._room = Room(layout, image)
        self._identity = image
        self._timeout_s = layout.config.guests.stage_timeout_s
        self._paused = time.monotonic()
        self._until = self._paused + self._timeout_s

    def blob(self, blob: Blob) -> Generator[None, None, Path]:
        """Copy a blob into the store if it is not there; returns its path."""
        final = self._folder / blob.sha256
        try:
            try:
                yield from self._ensure(blob, final)
            except OSError as err:
                if not files.is_full(err):
                    raise
                log.warning("image %s: %s; making room once more", self._image, err)
                yield from self._ensure(blob, final)
        except OSError as err:
            raise cannot_store(self._layout, self._identity, err) from err
        return final

    def _ensure(self, blob: Blob, final: Path) -> Generator[None, None, None]:
        if not _complete(final, blob.size):
            self._make_folder()
            yield from self._fetch_alone(blob, final)
        os.utime(final)  # marks the blob as recently used, so that others are removed first

    def chunk_list(self, blob: Blob) -> Generator[None, None, None]:
        """Copy the chunk list of a blob, to check its chunks; without it the blob is copied too.

        The list is kept: nodes that ask this one for the blob ask for its list first.
        """
        wanted = chunk_list(blob)
        if wanted is None or wanted.size > chunks.LIST_MAX:
            return
        if _complete(self._folder / blob.sha256, blob.size):
            if self._peers is None:
                return
            self._from_catalogue.add(wanted.sha256)  # only for others: it is not worth a wait
        try:
            path = yield from self.blob(wanted)
        except UserError as err:
            log.warning("image %s is copied without its chunk list: %s", self._image, err.line())
            if self._peers is not None:
                self._peers.lineage.withdraw(wanted.sha256)
            return
        self._hashes[blob.sha256] = path.read_bytes()

    def _make_folder(self) -> None:
        if self._account is None:
            self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            return
        # QEMU opens the root by its path; other users must not find the digests of a private image here
        for folder in (self._folder.parent.parent, self._folder.parent, self._folder):
            folder.mkdir(mode=0o711, parents=True, exist_ok=True)

    def _fetch_alone(self, blob: Blob, final: Path) -> Iterator[None]:
        """Copy a blob unless another job has copied it; of several jobs one copies, the others wait."""
        lock = self._folder / f".{blob.sha256}.lock"  # never removed: otherwise two jobs could hold two locks
        fd = files.open_lock(lock)
        try:
            while not files.try_lock(fd):
                if self._pause_is_due("another job is copying it"):
                    yield
                time.sleep(0.1)
            if not _complete(final, blob.size):
                yield from self._fetch(blob, final)
        finally:
            os.close(fd)

    def _pause_is_due(self, why: str) -> bool:
        """Whether to yield to the caller again.

        Raises:
            FabricError: the time is over; a UserError if the catalogue is the user's.
        """
        now = time.monotonic()
        if now > self._until:
            what = f"image {self._image} could not be copied within {self._timeout_s} s"
            if self._account is not None:
                raise UserError(what, why, "is the file system of your catalogue slow?")
            hint = "check the speed of the catalogue's file system, or raise guests.stage_timeout_s"
            raise FabricError(what, why, hint)
        if now - self._paused <= CHECK_S:
            return False
        self._paused = now
        return True

    def _fetch(self, blob: Blob, final: Path) -> Iterator[None]:
        hashes = self._hashes.get(blob.sha256, b"")
        if blob.chunks and not hashes:  # its copy must not count as verified
            blob = replace(blob, chunks="", chunk_size=0)
        copy = BlobCopy(
            self._image,
            blob,
            functools.partial(self._source, blob),
            None if blob.sha256 in self._from_catalogue else self._peers,
            self._pause_is_due,
            lambda: self._until - time.monotonic(),
            self.tally,
        )
        with Part(offers.part_of(final), blob, hashes) as part:
            self._room.reserve(blob, part)
            self._share(blob, part)
            yield from copy.run(part, final)
            self.copied += blob.size - (0 if part.shared else part.resumed)

    def _share(self, blob: Blob, part: Part) -> None:
        """Share the blocks of the catalogue's file, if both are on one file system that can."""
        if self._account is None:  # root opens no file of a user
            with (
                contextlib.suppress(UserError),
                self._source(blob, 0) as source,
            ):  # the copy says what is wrong
                part.share(source.fd)

    def _source(self, blob: Blob, start: int) -> contextlib.AbstractContextManager[Source]:
        path = self._catalog.blob_path(blob)
        if self._account is not None:
            return blobsource.of_user(path, self._account, start)
        return blobsource.of_site(path, blob, self._image, start)
