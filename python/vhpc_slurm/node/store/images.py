# SPDX-License-Identifier: Apache-2.0
"""The node's store of images: copies by digest, verified while they are copied.

A blob is copied from other nodes of the lease or from the catalogue to a
temporary name, hashed meanwhile, and only then renamed to its digest: a file
named by a digest has that digest.  Concurrent copies of one blob wait for each other (flock).  A pin per
generation records that an image is in use, and its blobs.

The content of a catalogue is not trusted: only regular files with the size in
the manifest are read, and only if the store has room for them.  A full store
removes blobs that no job uses.  If that does not suffice, it is not the node's
fault, since every job with that image would drain another node.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

from vhpc_slurm import chunks, files
from vhpc_slurm.catalog import blobs, chunk_list, own_folder, with_list
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
from vhpc_slurm.record import Record

log = logging.getLogger("vhpc")
ROOM_LEFT = 64 << 20
"""Bytes that a copy leaves free: journals may be on the same file system."""
CHECK_S = 2.0
BLOBS = 3
"""The blobs of an image: kernel, initrd, root."""


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
    """Copies of kernel and initrd for one guest.

    libvirt changes the owner of both to the uid of the guest's QEMU, so other
    guests must not boot from the same files.

    Raises:
        NodeError: they cannot be written.
    """
    kernel, initrd = folder / "kernel", folder / "initrd"
    try:
        shutil.copyfile(image.kernel, kernel)
        shutil.copyfile(image.initrd, initrd)
    except OSError as err:
        raise NodeError(f"cannot write {folder}", str(err), "free space in paths.run") from err
    return kernel, initrd


def is_stored(layout: Layout, image: ImageIdentity) -> bool:
    """Whether the store has all blobs of an image of the site."""
    return all(_complete(layout.blobs / blob.sha256, blob.size) for blob in blobs(image.manifest))


def pin(layout: Layout, image: ImageIdentity, generation: str) -> None:
    """Record that a generation uses an image, and its blobs."""
    folder = _pins(layout, image.digest)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    (folder / generation).write_text("".join(f"{blob.sha256}\n" for blob in with_list(image.manifest)))


def unpin(layout: Layout, digest: str, generation: str) -> None:
    """Remove a pin, if it exists."""
    folder = _pins(layout, digest)
    with contextlib.suppress(FileNotFoundError):
        (folder / generation).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def pins(layout: Layout) -> Iterator[tuple[str, str]]:
    """All pins: (image digest, generation)."""
    top = Path(layout.config.images.store) / "pins"
    with contextlib.suppress(FileNotFoundError):
        for folder in sorted(top.iterdir()):
            for path in sorted(folder.iterdir()):
                yield f"sha256:{folder.name}", path.name


def stored(layout: Layout) -> list[tuple[str, int]]:
    """Blobs of the site's images on this node: (sha256, size in bytes)."""
    try:
        return sorted((p.name, p.stat().st_size) for p in layout.blobs.iterdir() if len(p.name) == 64)
    except FileNotFoundError:
        return []


def _pins(layout: Layout, digest: str) -> Path:
    return Path(layout.config.images.store) / "pins" / digest.removeprefix("sha256:")


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
        self._layout, self._image, self._account = layout, str(image.ref), None
        self._own = {blob.sha256 for blob in with_list(image.manifest)}
        self.copied = 0
        catalog, owner = Path(layout.config.images.catalog), None
        if image.ref.own:
            assert account is not None, "an image of a user's own is read with that user's rights"
            self._account, owner = account, account.uid
            catalog = own_folder(layout.config.images.user_catalog, account.name)
        self._catalog = catalog / "blobs" / "sha256"
        self._folder = layout.blobs_of(owner)
        self._timeout_s = layout.config.guests.stage_timeout_s
        self._paused = time.monotonic()
        self._until = self._paused + self._timeout_s

    def blob(self, blob: Blob) -> Generator[None, None, Path]:
        """Copy a blob into the store if it is not there; returns its path."""
        final = self._folder / blob.sha256
        try:
            if not _complete(final, blob.size):
                self._make_folder()
                yield from self._fetch_alone(blob, final)
            os.utime(final)  # marks the blob as recently used, so that others are removed first
        except OSError as err:
            store = self._layout.config.images.store
            raise NodeError(
                f"cannot store image {self._image}", str(err), f"check the disk under {store}"
            ) from err
        return final

    def chunk_list(self, blob: Blob) -> Generator[None, None, None]:
        """Copy the chunk list of a blob, by which its chunks are checked; the blob is copied also without.

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
        if blob.chunks and not hashes:  # nobody may take its copy for verified
            blob = replace(blob, chunks="", chunk_size=0)
        path = offers.part_of(final)
        self._make_room(blob, path)
        copy = BlobCopy(
            self._image,
            blob,
            functools.partial(self._source, blob),
            None if blob.sha256 in self._from_catalogue else self._peers,
            self._pause_is_due,
            lambda: self._until - time.monotonic(),
            self.tally,
        )
        with Part(path, blob, hashes) as part:
            yield from copy.run(part, final)
            self.copied += blob.size - part.resumed

    def _source(self, blob: Blob, start: int) -> contextlib.AbstractContextManager[Source]:
        path = self._catalog / blob.sha256
        if self._account is not None:
            return blobsource.of_user(path, self._account, start)
        return blobsource.of_site(path, blob, self._image, start)

    def _make_room(self, blob: Blob, part: Path) -> None:
        """Make room for the rest of a blob: remove blobs that no job uses, the least recently used first."""
        try:
            wanted = blob.size - min(blob.size, part.lstat().st_size) + ROOM_LEFT
        except FileNotFoundError:
            wanted = blob.size + ROOM_LEFT
        space = os.statvfs(self._folder)
        if blob.size + ROOM_LEFT > space.f_blocks * space.f_frsize:
            raise UserError(
                f"image {self._image} is too large for this node",
                f"its {blob.file} has {blob.size >> 20} MiB, the node's image store "
                f"{space.f_blocks * space.f_frsize >> 20} MiB",
                "make a smaller image",
            )
        free = space.f_bavail * space.f_frsize
        for path in unused(self._layout) if wanted > free else ():
            if path.name in self._own:  # an image that is not pinned: its kernel, copied just now
                continue
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            space = os.statvfs(self._folder)
            free = space.f_bavail * space.f_frsize
            if wanted <= free:
                break
        if wanted > free:
            raise FabricError(
                f"the image store of this node has no room for image {self._image}",
                f"its {blob.file} has {blob.size >> 20} MiB, {free >> 20} MiB are free",
                f"free space under {self._folder}",
            )


def unused(layout: Layout) -> list[Path]:
    """Blobs that no live job uses, the least recently used one first.

    A pin that does not list its blobs (of an older version, or torn by a power
    cut) keeps all blobs.
    """
    top = Path(layout.config.images.store)
    used: set[str] = set()
    for digest, generation in pins(layout):
        named = (_pins(layout, digest) / generation).read_text().split()
        if len(named) < BLOBS:
            return []
        used.update(named)
    found = []
    for path in (path for folder in _folders(top) for path in folder.iterdir()):
        if len(path.name) == 64 and path.name not in used:
            found.append((path.stat().st_mtime, path))
        elif path.name.endswith(".part") and not files.is_locked(path.with_suffix(".lock")):
            found.append((0.0, path))  # left by a killed copy
    return [path for _, path in sorted(found)]


def _folders(store: Path) -> list[Path]:
    """Folders with blobs: of the site's images, and of users' own."""
    return [path for path in (store / "blobs/sha256", *sorted(store.glob("own/*/sha256"))) if path.is_dir()]
