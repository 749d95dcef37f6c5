# SPDX-License-Identifier: Apache-2.0
"""The node's store of images: copies by digest, verified while they are copied.

A blob is copied from the catalogue to a temporary name, hashed meanwhile, and
only then renamed to its digest: a file named by a digest has that digest.
Concurrent copies of one blob wait for each other (flock).  A pin per
generation records that an image is in use, and its blobs.

The content of a catalogue is not trusted: only regular files with the size in
the manifest are read, and only if the store has room for them.  A full store
removes blobs that no job uses.  If that does not suffice, it is not the node's
fault, since every job with that image would drain another node.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm import files
from vhpc_slurm.errors import FabricError, NodeError, UserError
from vhpc_slurm.model import Blob, ImageIdentity
from vhpc_slurm.node.store.layout import Layout

CHUNK = 1 << 20
ROOM_LEFT = 64 << 20
"""Bytes that a copy leaves free: journals may be on the same file system."""
CHECK_S = 2.0
BLOBS = 3
"""The blobs of an image: kernel, initrd, root."""


@dataclass(frozen=True)
class StagedImage:
    """An image on this node: paths of root-owned, verified, read-only files."""

    kernel: Path
    initrd: Path
    root: Path


def stage(layout: Layout, image: ImageIdentity) -> Generator[None, None, StagedImage]:
    """Copy every blob of an image to the node, verified; a generator.

    Yields every ``CHECK_S`` seconds of a copy or of the wait for one; an exception
    that the caller throws in ends it.  Returns the staged image.

    Args:
        layout: has the paths of the catalogue and the store.
        image: the image; it must be pinned.

    Raises:
        UserError: a blob is missing, differs from the manifest, or is larger than the store:
            the image is broken, not the node.
        FabricError: the store has no room now, or the catalogue is too slow.
        NodeError: the node cannot store it.
    """
    manifest = image.manifest
    copies = _Copies(layout, str(image.ref))
    kernel = yield from copies.blob(manifest.kernel)
    initrd = yield from copies.blob(manifest.initrd)
    root = yield from copies.blob(manifest.root)
    return StagedImage(kernel, initrd, root)


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


def pin(layout: Layout, image: ImageIdentity, generation: str) -> None:
    """Record that a generation uses an image, and its blobs."""
    folder = _pins(layout, image.digest)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    manifest = image.manifest
    blobs = (manifest.kernel, manifest.initrd, manifest.root)
    (folder / generation).write_text("".join(f"{blob.sha256}\n" for blob in blobs))


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
    """Blobs on this node: (sha256, size in bytes)."""
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

    def __init__(self, layout: Layout, image: str) -> None:
        self._catalog = Path(layout.config.images.catalog) / "blobs" / "sha256"
        self._folder = layout.blobs
        self._timeout_s = layout.config.guests.stage_timeout_s
        self._paused = time.monotonic()
        self._until = self._paused + self._timeout_s
        self._layout, self._image = layout, image

    def blob(self, blob: Blob) -> Generator[None, None, Path]:
        """Copy a blob into the store if it is not there; returns its path."""
        final = self._folder / blob.sha256
        try:
            if not _complete(final, blob.size):
                self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
                yield from self._fetch_alone(blob, final)
            os.utime(final)  # marks the blob as recently used, so that others are removed first
        except OSError as err:
            store = self._layout.config.images.store
            raise NodeError(
                f"cannot store image {self._image}", str(err), f"check the disk under {store}"
            ) from err
        return final

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
        """Whether to yield to the caller again; FabricError when the time is over."""
        now = time.monotonic()
        if now > self._until:
            raise FabricError(
                f"image {self._image} could not be copied within {self._timeout_s} s",
                why,
                "check the speed of the catalogue's file system, or raise guests.stage_timeout_s",
            )
        if now - self._paused <= CHECK_S:
            return False
        self._paused = now
        return True

    def _fetch(self, blob: Blob, final: Path) -> Iterator[None]:
        part = final.with_name(f".{blob.sha256}.part")
        with self._source(blob) as source:
            part.unlink(missing_ok=True)  # left by a killed copy: this process has the lock
            self._make_room(blob)
            try:
                yield from self._copy(source, part, blob)
                part.rename(final)
            finally:
                part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _source(self, blob: Blob) -> Iterator[int]:
        """Open a blob of the catalogue; a pipe there must not block the hook."""
        try:
            fd = os.open(
                self._catalog / blob.sha256, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
            )
        except OSError as err:
            raise UserError(
                f"image {self._image} is incomplete",
                f"its {blob.file} is not in the catalogue: {err.strerror}",
                "publish it again",
            ) from err
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise self._damaged(blob, "it is not a regular file")
            if about.st_size != blob.size:
                raise self._damaged(blob, f"it has {about.st_size} bytes, the manifest says {blob.size}")
            yield fd
        finally:
            os.close(fd)

    def _make_room(self, blob: Blob) -> None:
        """Make room for a blob: remove blobs that no job uses, the least recently used first."""
        space = os.statvfs(self._folder)
        if blob.size + ROOM_LEFT > space.f_blocks * space.f_frsize:
            raise UserError(
                f"image {self._image} is too large for this node",
                f"its {blob.file} has {blob.size >> 20} MiB, the node's image store "
                f"{space.f_blocks * space.f_frsize >> 20} MiB",
                "make a smaller image",
            )
        free = space.f_bavail * space.f_frsize
        for path in unused(self._layout) if blob.size + ROOM_LEFT > free else ():
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            space = os.statvfs(self._folder)
            free = space.f_bavail * space.f_frsize
            if blob.size + ROOM_LEFT <= free:
                break
        if blob.size + ROOM_LEFT > free:
            raise FabricError(
                f"the image store of this node has no room for image {self._image}",
                f"its {blob.file} has {blob.size >> 20} MiB, {free >> 20} MiB are free",
                f"free space under {self._folder}",
            )

    def _copy(self, source: int, part: Path, blob: Blob) -> Iterator[None]:
        digest = hashlib.sha256()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(part, flags, 0o644), "wb") as write:
            os.fchmod(write.fileno(), 0o644)
            left = blob.size
            while left > 0 and (chunk := os.read(source, min(CHUNK, left))):
                digest.update(chunk)
                write.write(chunk)
                left -= len(chunk)
                if self._pause_is_due(f"{left >> 20} MiB of its {blob.file} are left"):
                    yield
            write.flush()
            os.fsync(write.fileno())
        if left or digest.hexdigest() != blob.sha256:
            found = f"sha256 {digest.hexdigest()[:16]}… and {blob.size - left} bytes"
            raise self._damaged(
                blob, f"it has {found}, the manifest says {blob.sha256[:16]}… and {blob.size}"
            )

    def _damaged(self, blob: Blob, why: str) -> UserError:
        return UserError(f"image {self._image} is damaged", f"{blob.file}: {why}", "publish it again")


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
    with contextlib.suppress(FileNotFoundError):
        for path in (top / "blobs" / "sha256").iterdir():
            if len(path.name) == 64 and path.name not in used:
                found.append((path.stat().st_mtime, path))
            elif path.name.endswith(".part") and not files.is_locked(path.with_suffix(".lock")):
                found.append((0.0, path))  # left by a killed copy
    return [path for _, path in sorted(found)]
