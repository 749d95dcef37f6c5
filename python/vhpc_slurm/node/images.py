"""The node's store of images: copies by digest, verified while they arrive.

A blob is copied from the catalogue under a name of its own, hashed on the way,
and only then renamed to its digest: what has a digest for a name is what the
digest says.  Copies of one blob at the same time wait for each other (flock).
A pin per generation says that an image is in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import Blob, ImageIdentity
from vhpc_slurm.node.layout import Layout

CHUNK = 1 << 20


@dataclass(frozen=True)
class StagedImage:
    """An image on this node: paths of root-owned, verified, read-only files."""

    kernel: Path
    initrd: Path
    root: Path


def stage(layout: Layout, image: ImageIdentity) -> StagedImage:
    """Have every blob of an image on the node, verified.

    Raises:
        UserError: the catalogue lacks a blob, or its bytes are not what the
            manifest says: the image is broken, the node is not.
        NodeError: the node cannot store it.
    """
    manifest = image.manifest
    catalog = Path(layout.config.images.catalog)
    store = Path(layout.config.images.store)
    kernel, initrd, root = (
        _blob(catalog, store, blob, str(image.ref))
        for blob in (manifest.kernel, manifest.initrd, manifest.root)
    )
    return StagedImage(kernel, initrd, root)


def private_copies(image: StagedImage, folder: Path) -> tuple[Path, Path]:
    """Copies of kernel and initrd for one guest.

    libvirt gives both to the uid that the guest's QEMU runs as, which must
    happen to no file that other guests boot from.

    Raises:
        NodeError: they cannot be written.
    """
    kernel, initrd = folder / "kernel", folder / "initrd"
    try:
        shutil.copyfile(image.kernel, kernel)
        shutil.copyfile(image.initrd, initrd)
    except OSError as err:
        raise NodeError(f"cannot write {folder}", str(err), "check that paths.run has room") from err
    return kernel, initrd


def pin(layout: Layout, digest: str, generation: str) -> None:
    """Note that a generation uses an image."""
    folder = _pins(layout, digest)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    (folder / generation).touch(mode=0o600)


def unpin(layout: Layout, digest: str, generation: str) -> None:
    """Take a pin away; nothing happens when there is none."""
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
    folder = Path(layout.config.images.store) / "blobs" / "sha256"
    try:
        return sorted((p.name, p.stat().st_size) for p in folder.iterdir() if len(p.name) == 64)
    except FileNotFoundError:
        return []


def _pins(layout: Layout, digest: str) -> Path:
    return Path(layout.config.images.store) / "pins" / digest.removeprefix("sha256:")


def _blob(catalog: Path, store: Path, blob: Blob, image: str) -> Path:
    folder = store / "blobs" / "sha256"
    final = folder / blob.sha256
    if _complete(final, blob.size):
        return final
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _single_flight(folder / f".{blob.sha256}.lock"):
            if not _complete(final, blob.size):
                _copy(catalog / "blobs" / "sha256" / blob.sha256, final, blob, image)
    except OSError as err:
        raise NodeError(f"cannot store image {image}", str(err), f"check the disk under {store}") from err
    return final


def _complete(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _single_flight(path: Path) -> Iterator[None]:
    """Hold the lock of a blob; its file stays, since removing it would let two holders exist."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _copy(source: Path, final: Path, blob: Blob, image: str) -> None:
    part = final.with_name(f".{blob.sha256}.part")
    digest = hashlib.sha256()
    size = 0
    try:
        read = source.open("rb")
    except OSError as err:
        raise UserError(
            f"image {image} is incomplete",
            f"its {blob.file} is not in the catalogue: {err.strerror}",
            "publish it anew",
        ) from err
    with read, part.open("wb") as write:
        os.fchmod(write.fileno(), 0o644)
        while chunk := read.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
            if size > blob.size:
                break
            write.write(chunk)
        write.flush()
        os.fsync(write.fileno())
    if size != blob.size or digest.hexdigest() != blob.sha256:
        part.unlink()
        raise UserError(
            f"image {image} is damaged",
            f"its {blob.file} has sha256 {digest.hexdigest()[:16]}… and {size} bytes, "
            f"the manifest says {blob.sha256[:16]}… and {blob.size}",
            "publish it anew",
        )
    part.rename(final)
