# SPDX-License-Identifier: Apache-2.0
"""Puts images into a catalogue: blobs first, then the manifest, the name last, each by a rename."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vhpc_slurm import chunks, files, pointers
from vhpc_slurm.beside import Beside
from vhpc_slurm.catalog.changes import changing, locked, make_folder, place
from vhpc_slurm.catalog.edit import append_signature
from vhpc_slurm.catalog.folder import CHUNK, FolderCatalog
from vhpc_slurm.catalog.manifest import Manifest, canonical, decode_whole, with_list
from vhpc_slurm.catalog.port import Catalog, identity
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import Blob, ImageIdentity, ImageRef

FOLDERS = ("blobs/sha256", "manifests/sha256", "names")


@dataclass(frozen=True)
class Published:
    """The digest that a name points to; ``changed``: whether this call changed it."""

    digest: str
    changed: bool


def prepare(catalog: Path) -> None:
    """Make the folders of a catalogue that are missing, readable for all.

    Raises:
        UserError: they cannot be made.
    """
    with changing(catalog):
        make_folder(catalog)
    with locked(catalog), changing(catalog):
        for name in FOLDERS:
            make_folder(catalog / name)


def digest_of(
    path: Path,
    *,
    sync: bool = False,
    chunk_list: chunks.ChunkList | None = None,
    count: Callable[[int], None] = lambda _: None,
) -> Blob:
    """Digest and size of a regular file; no link is followed. ``sync``: its bytes are on disk on return.

    ``chunk_list`` gets its bytes, too, in a thread, and ``count`` the
    number of bytes of each piece that was read.

    Raises:
        UserError: it is not a regular file, is empty, or cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    take = chunk_list.update if chunk_list is not None else lambda _: None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0) as file, ThreadPoolExecutor(1) as syncing:
            synced = syncing.submit(os.fsync, fd) if sync else None
            with Beside(take) as listed:
                while chunk := file.read(CHUNK):
                    listed.put(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                    count(len(chunk))
            if synced is not None:
                synced.result()
    except OSError as err:
        raise UserError(f"cannot read {path}", err.strerror or str(err)) from err
    if size == 0:
        raise UserError(f"cannot publish {path}", "it is empty")
    return Blob(path.name, digest.hexdigest(), size)


def publish(catalog: Path, ref: ImageRef, manifest: dict[str, Any], new: dict[str, Path]) -> Published:
    """Put an image into a catalogue.

    Args:
        catalog: prepared by ``prepare``.
        ref: the name that points to the image from then on.
        manifest: the whole manifest; its blobs are in the catalogue, or in ``new``.
        new: sha256 -> a file with these bytes on the catalogue's file system, which is moved.

    If the image under that name differs only in the time at which it was created, it stays.

    Raises:
        UserError: the catalogue cannot be changed, the manifest is not one that vhpc accepts, or a
            blob was removed meanwhile.
    """
    raw = canonical(manifest)
    try:
        decoded = decode_whole(raw)
    except ValueError as err:
        raise UserError(f"cannot publish the image {ref}", str(err)) from err
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    image = identity(ref, digest, raw)
    with locked(catalog), changing(catalog):
        _move(catalog, new)
        _check_blobs(catalog, image)
        before = _current(catalog, ref, decoded.arch)
        if before is not None and _undated(before[1]) == _undated(decoded):
            return Published(before[0], changed=False)
        _place_manifest(catalog, digest, raw)
        _point(catalog, ref, decoded.arch, digest)
    return Published(digest, changed=True)


def publish_bytes(
    catalog: Path, ref: ImageRef, raw: bytes, new: dict[str, Path], signatures: Sequence[bytes]
) -> Published:
    """Put an image of another catalogue into this one: the manifest's bytes, and so the digest, are the same.

    Args:
        catalog: prepared by ``prepare``.
        ref: the name that points to the image from then on.
        raw: the manifest.
        new: as for ``publish``; the other blobs are in the catalogue, and their bytes were checked.
        signatures: in the text form of OpenSSH; those that the catalogue has are not added again.

    Raises:
        UserError: the catalogue cannot be changed, the manifest is not one that vhpc accepts, or a
            blob was removed meanwhile.
    """
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    image = identity(ref, digest, raw)
    with locked(catalog), changing(catalog):
        _move(catalog, new)
        _check_blobs(catalog, image)
        _place_manifest(catalog, digest, raw)
        for signature in signatures:
            append_signature(catalog, image, signature)
        arch = image.manifest.arch
        before = _pointed(catalog, ref).get(arch)
        if before != digest:
            _point(catalog, ref, arch, digest)
    return Published(digest, changed=before != digest)


def has_blob(catalog: Path, blob: Blob) -> bool:
    """Whether a catalogue has a file of a blob's name and size; its bytes are not read."""
    try:
        return FolderCatalog(catalog).blob_path(blob).stat().st_size == blob.size
    except OSError:
        return False


def _check_blobs(catalog: Path, image: ImageIdentity) -> None:
    """UserError if a blob that the catalogue had is gone: gc removes those that no manifest needs yet."""
    for blob in with_list(image.manifest):
        if not has_blob(catalog, blob):
            why = f"its {blob.file} was removed from the catalogue meanwhile"
            raise UserError(f"cannot publish the image {image.ref.label}", why, "try again")


def _move(catalog: Path, new: dict[str, Path]) -> None:
    """Move finished files to their places among the blobs."""
    for sha256, path in new.items():
        path.chmod(0o644)
        files.sync_file(path)
        path.replace(catalog / "blobs/sha256" / sha256)
    files.sync_folder(catalog / "blobs/sha256")


def _place_manifest(catalog: Path, digest: str, raw: bytes) -> None:
    place(FolderCatalog(catalog).manifest_file(digest), raw)


def _point(catalog: Path, ref: ImageRef, arch: str, digest: str) -> None:
    """Let a name point to an image; its images of other architectures stay."""
    pointer = FolderCatalog(catalog).name_file(ref)
    make_folder(pointer.parent)
    place(pointer, pointers.encode(_pointed(catalog, ref) | {arch: digest}))


def copy_blob(source: Catalog, catalog: Path, blob: Blob, target: Path) -> bool:
    """Copy a blob of another catalogue to a file; False if this catalogue has it.

    Raises:
        UserError: the source is missing, or its bytes are not the blob's.
    """
    try:
        FolderCatalog(catalog).verify_blob(blob, blob.file)
    except VhpcError:
        with changing(catalog):
            files.copy(source.blob_path(blob), target)
        found = digest_of(target)
        if (found.sha256, found.size) != (blob.sha256, blob.size):
            why = f"its {blob.file} is sha256:{found.sha256} instead of sha256:{blob.sha256}"
            raise UserError("the image with the kernel is broken", why, "publish it again") from None
        return True
    return False


def _current(catalog: Path, ref: ImageRef, arch: str) -> tuple[str, Manifest] | None:
    """Digest and manifest of a name's image for an architecture; None if it is missing or broken."""
    digest = _pointed(catalog, ref).get(arch)
    if digest is None:
        return None
    try:
        return digest, FolderCatalog(catalog).read_manifest(digest)
    except VhpcError:
        return None


def _pointed(catalog: Path, ref: ImageRef) -> dict[str, str]:
    """Architecture -> digest of a name; empty if the catalogue has no such name."""
    try:
        return FolderCatalog(catalog).pointed(ref)
    except OSError:
        return {}


def _undated(manifest: Manifest) -> Manifest:
    origin = msgspec.structs.replace(manifest.provenance, created="")
    return msgspec.structs.replace(manifest, provenance=origin)
