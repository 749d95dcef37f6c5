# SPDX-License-Identifier: Apache-2.0
"""Room in the node's store of images.

A full store is never the node's fault: users choose images, and every job with such an image would
drain one node more.  An image that no store of this size can hold fails its job.  If other jobs, or
other files of the file system, have the space now, the job is requeued: Slurm holds it back for two
minutes each time, and it starts when these jobs have ended or an operator has made space.

One copy at a time looks for room, and reserves the blocks before it lets the next one look: two images
that have room one by one, and not together, do not meet in a full file system.
"""
# Decision: A full image store requeues jobs, and drains nothing

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm import files
from vhpc_slurm.catalog import with_list
from vhpc_slurm.errors import FabricError, NodeError, UserError
from vhpc_slurm.model import Blob, ImageIdentity
from vhpc_slurm.node.store import pins
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.part import Part

MIB = 1 << 20
LOCK = ".room.lock"
LOCK_TIMEOUT_S = 30.0
"""Removing blobs of many GiB takes seconds."""


class Room:
    """Finds room for the blobs of one image."""

    def __init__(self, layout: Layout, image: ImageIdentity) -> None:
        self._layout, self._image = layout, image
        self._own = {blob.sha256 for blob in with_list(image.manifest)}
        self._total = sum(blob.size for blob in with_list(image.manifest))

    def reserve(self, blob: Blob, part: Part) -> None:
        """Reserve space for the rest of a blob: remove what no job uses, the least recently used first.

        Raises:
            UserError: the image is larger than the store.
            FabricError: there is no room now.
            OSError: the store cannot be used; also if its file system has become full.
        """
        with _locked(self._layout):
            self._make_room(blob, part)
            part.reserve()

    def _make_room(self, blob: Blob, part: Part) -> None:
        if self._total > (capacity := capacity_of(self._layout)):
            why = f"its files have {self._total >> 20} MiB, the node's image store {capacity >> 20} MiB"
            raise UserError(
                f"image {self._image.ref} is too large for this node", why, "make a smaller image"
            )
        wanted = max(0, blob.size - part.allocated())
        for path in pins.unused(self._layout) if wanted > free_of(self._layout) else ():
            if path == part.path or path.name in self._own:  # not pinned: its kernel, copied just now
                continue
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            if wanted <= free_of(self._layout):
                break
        if wanted > (free := free_of(self._layout)):
            raise no_room(self._image, f"its {blob.file} needs {wanted >> 20} MiB, {free >> 20} MiB are free")


def capacity_of(layout: Layout) -> int:
    """Bytes of images that this node's store can have, if its file system has nothing else; OSError."""
    space = os.statvfs(layout.config.images.store)
    return _limited(layout, space.f_blocks * space.f_frsize, 0)


def free_of(layout: Layout) -> int:
    """Bytes that further copies may have now, without the removal of others; OSError."""
    space = os.statvfs(layout.config.images.store)
    return _limited(layout, space.f_bavail * space.f_frsize, used_of(layout))


def used_of(layout: Layout) -> int:
    """Bytes that images have on this node, with the space that copies have reserved."""
    return sum(
        size_of(path) for folder in pins.folders(Path(layout.config.images.store)) for path in _in(folder)
    )


def size_of(path: Path) -> int:
    """Bytes of a file on its file system; 0 if it is gone."""
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _in(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _limited(layout: Layout, space: int, used: int) -> int:
    """The part of the space that is for images; journals may be on the same file system."""
    images = layout.config.images
    space -= images.store_keep_free_mib * MIB
    if images.store_max_mib:
        space = min(space, images.store_max_mib * MIB - used)
    return max(0, space)


def pin(layout: Layout, image: ImageIdentity, generation: str) -> None:
    """Record that a generation uses an image, before it looks which blobs are there.

    No process removes blobs meanwhile: a search for blobs without a pin removes them before this one is made.

    Raises:
        FabricError: there is no space for the record.
        NodeError: it cannot be written.
    """
    try:
        with _locked(layout):
            pins.pin(layout, image, generation)
    except OSError as err:
        raise cannot_store(layout, image, err) from err


def no_room(image: ImageIdentity, why: str) -> FabricError:
    """The error if an image has no room now."""
    return FabricError(
        f"the image store of this node has no room for image {image.ref}",
        why,
        "it is tried again; space becomes free when jobs with other images end, or other files are removed",
    )


def cannot_store(layout: Layout, image: ImageIdentity, err: OSError) -> FabricError | NodeError:
    """The error if the store cannot be written to: only a full one is not the node's fault."""
    if files.is_full(err):
        return no_room(image, err.strerror or str(err))
    hint = f"check the disk under {layout.config.images.store}"
    return NodeError(f"cannot store image {image.ref}", str(err), hint)


@contextlib.contextmanager
def _locked(layout: Layout) -> Iterator[None]:
    top = Path(layout.config.images.store)
    top.mkdir(mode=0o755, parents=True, exist_ok=True)
    with files.locked(top / LOCK, LOCK_TIMEOUT_S) as held:
        if not held:
            what = f"the image store of this node was locked for {LOCK_TIMEOUT_S:g} s"
            raise FabricError(what, "another job makes room in it", f"check the disk under {top}")
        yield
