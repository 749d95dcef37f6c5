# SPDX-License-Identifier: Apache-2.0
"""Pins: which generations use which images of the node's store, and so which blobs may be removed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm import files
from vhpc_slurm.catalog import with_list
from vhpc_slurm.model import ImageIdentity
from vhpc_slurm.node.store.layout import Layout

BLOBS = 3
"""The blobs of an image: kernel, initrd, root."""
TRIES = 100


def pin(layout: Layout, image: ImageIdentity, generation: str) -> None:
    """Record that a generation uses an image, and its blobs."""
    folder, used = _pins(layout, image.digest), with_list(image.manifest)
    for left in reversed(range(TRIES)):
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            (folder / generation).write_text("".join(f"{blob.sha256}\n" for blob in used))
        except (FileNotFoundError, FileExistsError):  # another job has just removed the empty folder
            if not left:
                raise
        else:
            return


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
    for folder in _content(top):
        for path in _content(folder):
            yield f"sha256:{folder.name}", path.name


def unused(layout: Layout) -> list[Path]:
    """Blobs that no live job uses, the least recently used one first.

    A pin that does not list its blobs (torn by a power cut) keeps all blobs.
    """
    top = Path(layout.config.images.store)
    used: set[str] = set()
    for digest, generation in pins(layout):
        try:
            named = (_pins(layout, digest) / generation).read_text().split()
        except FileNotFoundError:  # its job has ended just now
            continue
        if len(named) < BLOBS:
            return []
        used.update(named)
    found = []
    for path in (path for folder in folders(top) for path in _content(folder)):
        with contextlib.suppress(FileNotFoundError):  # a copy of another job has removed it, or got its name
            if len(path.name) == 64 and path.name not in used:
                found.append((path.stat().st_mtime, path))
            elif path.name.endswith(".part") and not files.is_locked(path.with_suffix(".lock")):
                found.append((0.0, path))  # left by a killed copy
    return [path for _, path in sorted(found)]


def _content(folder: Path) -> list[Path]:
    """The files of a folder; none if it does not exist, or not any more."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def folders(store: Path) -> list[Path]:
    """Folders with blobs: of the site's images, and of users' own."""
    return [path for path in (store / "blobs/sha256", *sorted(store.glob("own/*/sha256"))) if path.is_dir()]


def _pins(layout: Layout, digest: str) -> Path:
    return Path(layout.config.images.store) / "pins" / digest.removeprefix("sha256:")
