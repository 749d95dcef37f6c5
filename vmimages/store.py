# SPDX-License-Identifier: Apache-2.0
"""Writes images into a catalogue; vhpc_slurm.catalog reads them.

``vhpc_slurm.catalog.publish`` does the same with msgspec. The builder runs on hosts whose Python has the
standard library only, so of vhpc_slurm it imports modules that need no more.

Layout and manifest: docs/image-format.md.  Blobs are written first and the name
last, each by rename, so that a reader sees either the old or the new image.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vhpc_slurm import files, pointers
from vhpc_slurm.chunks import ChunkList, key
from vmimages.errors import BuildError

CHUNK = 1 << 20


@dataclass(frozen=True)
class Blob:
    """A blob to publish: its media type, and its bytes or a file with them."""

    media_type: str
    data: Path | bytes

    def size(self) -> int:
        """Number of bytes."""
        return len(self.data) if isinstance(self.data, bytes) else self.data.stat().st_size


@dataclass(frozen=True)
class Published:
    """The digest that a name points to; ``changed``: whether this call changed it."""

    digest: str
    changed: bool


def publish(
    catalog: Path, name: str, tag: str, manifest: dict[str, Any], blobs: dict[str, Blob]
) -> Published:
    """Put an image into a catalogue.

    Args:
        catalog: the folder; created if absent.
        name, tag: what points to the image.
        manifest: the manifest's keys without those in ``blobs``.
        blobs: the manifest's keys kernel, initrd and root.

    If the published image differs only in the time at which it was created, it stays.

    Raises:
        BuildError: the catalogue cannot be written; the name is unchanged.
    """
    try:
        catalog.mkdir(parents=True, exist_ok=True)
        with _lock(catalog):
            for part in ("blobs/sha256", "manifests/sha256", f"names/{name}"):
                (catalog / part).mkdir(parents=True, exist_ok=True)
            listed = ChunkList()
            full = manifest | {
                field: _blob(catalog, blob, listed if field == "root" else None)
                for field, blob in blobs.items()
            }
            if found := key(listed.raw()):
                full["chunks"] = found
                _blob(catalog, Blob("", listed.raw()))
            pointer = catalog / "names" / name / tag
            known = _pointers(pointer)
            before = _current(catalog, known.get(full["arch"], ""))
            if before is not None and _undated(before[1]) == _undated(full):
                return Published(before[0], changed=False)
            text = canonical(full)
            digest = hashlib.sha256(text).hexdigest()
            _write(catalog / "manifests/sha256" / f"{digest}.json", text)
            _write(pointer, pointers.encode(known | {full["arch"]: f"sha256:{digest}"}))
    except OSError as err:
        raise BuildError(f"cannot publish in {catalog}", str(err)) from err
    return Published(f"sha256:{digest}", changed=True)


def canonical(manifest: dict[str, Any]) -> bytes:
    """The canonical form of a manifest (RFC 8785; keys are ASCII, numbers are integers below 2**53)."""
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _undated(manifest: dict[str, Any]) -> dict[str, Any]:
    origin = manifest.get("provenance")
    return manifest | {"provenance": origin | {"created": ""} if isinstance(origin, dict) else origin}


def _pointers(name: Path) -> dict[str, str]:
    """Architecture -> digest of a name; empty if there is no such name, or its file is damaged."""
    try:
        return pointers.parse(name.read_bytes()[: pointers.LIMIT].decode("ascii", "replace"))
    except FileNotFoundError:
        return {}


def _current(catalog: Path, digest: str) -> tuple[str, dict[str, Any]] | None:
    """Digest and manifest of an image; None if they are missing or damaged."""
    try:
        raw = (catalog / "manifests/sha256" / (digest.removeprefix("sha256:") + ".json")).read_bytes()
        manifest = json.loads(raw)
    except (FileNotFoundError, ValueError):
        return None
    if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest or not isinstance(manifest, dict):
        return None
    return digest, manifest


def _blob(catalog: Path, blob: Blob, chunk_list: ChunkList | None = None) -> dict[str, Any]:
    """Write a blob to the catalogue; return the manifest's entry for it. ``chunk_list`` gets its bytes."""
    folder = catalog / "blobs/sha256"
    digest, size = hashlib.sha256(), 0
    fd, name = tempfile.mkstemp(prefix=".new-", dir=folder)
    try:
        os.fchmod(fd, 0o644)
        for chunk in _chunks(blob.data):
            digest.update(chunk)
            if chunk_list is not None:
                chunk_list.update(chunk)
            size += len(chunk)
            files.write(fd, chunk)
        os.fsync(fd)
        # Replace an existing blob: it may be damaged, and this one is known to be good.
        Path(name).rename(folder / digest.hexdigest())
    finally:
        os.close(fd)
        Path(name).unlink(missing_ok=True)
    return {"media_type": blob.media_type, "sha256": digest.hexdigest(), "size": size}


def _chunks(data: Path | bytes) -> Iterator[bytes]:
    if isinstance(data, bytes):
        yield data
        return
    with data.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def _write(final: Path, text: bytes) -> None:
    """Write a small file atomically."""
    new = final.with_name(f".new-{final.name}")
    files.write_beside(final, new, text, 0o644)
    new.replace(final)
    files.sync_folder(final.parent)


@contextlib.contextmanager
def _lock(catalog: Path) -> Iterator[None]:
    with (catalog / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
