# SPDX-License-Identifier: Apache-2.0
"""Puts a vhpc image of a registry into a catalogue; its digest stays the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm import chunks
from vhpc_slurm.catalog import FolderCatalog, blobs, decode_manifest
from vhpc_slurm.catalog.armour import split
from vhpc_slurm.catalog.changes import check_new_name, staging
from vhpc_slurm.catalog.manifest import InitrdBlob, KernelBlob, RootBlob, decode_whole
from vhpc_slurm.catalog.publish import digest_of, has_blob, prepare, publish_bytes
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.importing.alone import alone
from vhpc_slurm.importing.fetch import fetch_artifact
from vhpc_slurm.importing.offer import Artifact, Document, look, reference
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import Blob, ImageRef
from vhpc_slurm.progress import counter

SLACK = 1 << 20
"""Bytes that skopeo may write in addition to the parts of an image."""


@dataclass(frozen=True)
class Pulled:
    """An image that was pulled.

    Attributes:
        image: its name.
        digest: of the image.
        registry_digest: the digest that names it in the registry.
        changed: whether the name pointed to another image before.
        fetched: bytes of kernel, initrd and root that the catalogue did not have.
        signatures: their number in the registry.
    """

    image: str
    digest: str
    registry_digest: str
    changed: bool
    fetched: int
    signatures: int


def pull(
    images: Images, text: str, target: ImageRef, catalog: Path, progress: Callable[[str], None]
) -> Pulled:
    """Pull an image into a catalogue; nothing is published unless all of it is sound.

    Args:
        images: the site's configuration.
        text: ``docker://REGISTRY/NAME[:TAG][@DIGEST]``; a digest is that of the registry.
        target: name of the image.
        catalog: where to put it; made if it does not exist.
        progress: gets a line for each step.

    Raises:
        UserError: the registry has no such vhpc image, what it sends is refused, or the catalogue
            cannot be changed.
    """
    source = reference(text, "pull")
    check_new_name(target)
    prepare(catalog)
    with alone(catalog, images.import_timeout_s, progress):
        offer = look(source, images.import_timeout_s)
        if offer.image is None:
            raise UserError(
                f"cannot pull {source}",
                "it is a container, not a vhpc image",
                f"use: vhpc image import {source} {target.label}",
            )
        return take(images, offer.source, offer.image, target, catalog, progress)


def is_whole(catalog: Path, target: ImageRef, image: Artifact) -> bool:
    """Whether a name points to this image, with files of the right sizes and with the same signatures."""
    try:
        folder = FolderCatalog(catalog)
        known = folder.resolve(ImageRef(target.name, target.tag))
        if known.digest != image.digest or not all(has_blob(catalog, blob) for blob in blobs(known.manifest)):
            return False
        signatures = folder.read_signed(known).signatures
    except VhpcError:
        return False
    return image.signatures is None or hashlib.sha256(signatures).hexdigest() == image.signatures.sha256


def take(
    images: Images,
    source: Source,
    image: Artifact,
    target: ImageRef,
    catalog: Path,
    progress: Callable[[str], None],
) -> Pulled:
    """Fetch and publish what ``look`` has found; the caller holds the lock of ``alone``.

    Args:
        images: the site's configuration.
        source: what the user named, with the registry's digest.
        image: its parts.
        target: name of the image.
        catalog: prepared by ``catalog.publish.prepare``.
        progress: gets a line for each step.

    Raises:
        UserError: what the registry sends is refused, or the catalogue cannot be changed.
    """
    parts = [Blob(part, blob.sha256, blob.size) for part, blob in _parts(image)]
    size = sum(blob.size for blob in parts)
    limit = images.import_max_mib << 20
    if size > limit:
        why = f"it has {size >> 20} MiB, more than {limit >> 20} MiB"
        raise UserError(f"cannot pull {source}", why, "images.import_max_mib is the limit")
    known = FolderCatalog(catalog)
    present = {blob.sha256: known.blob_path(blob) for blob in parts if _is_sound(known, blob)}
    absent = {blob.sha256: blob for blob in parts if blob.sha256 not in present}
    missing = sum(blob.size for blob in absent.values())
    there = f", the catalogue has the other {(size - missing) >> 20} MiB" if present and missing else ""
    progress(f"fetching {source}: {missing >> 20} MiB{there}" if missing else f"{source} is here already")
    with staging(catalog) as folder:
        out = folder / "out"
        out.mkdir()
        fetch_artifact(
            source.pinned, out, present, missing, missing + SLACK, images.import_timeout_s, progress
        )
        files = _files(source, out)
        raw = _document(source, files, image.manifest, "manifest")
        _check_manifest(source, raw, image)
        signatures = (
            b"" if image.signatures is None else _document(source, files, image.signatures, "signatures")
        )
        count = counter(progress, "checked", missing)
        new = {blob.sha256: _checked(source, files, blob, count) for blob in absent.values()}
        new |= _chunk_list(source, raw, new | present, folder / "chunks")
        progress("publishing")
        found = split(signatures)
        done = publish_bytes(catalog, target, raw, new, found)
    return Pulled(target.label, done.digest, source.digest, done.changed, missing, len(found))


def _parts(image: Artifact) -> list[tuple[str, KernelBlob | InitrdBlob | RootBlob]]:
    return [("kernel", image.kernel), ("initrd", image.initrd), ("root", image.root)]


def _is_sound(catalog: FolderCatalog, blob: Blob) -> bool:
    """Whether the catalogue has a blob, byte for byte."""
    try:
        catalog.verify_blob(blob, blob.file)
    except VhpcError:
        return False
    return True


def _files(source: Source, out: Path) -> Path:
    """The folder of blobs in a layout; UserError if what wrote it put a link in its place."""
    for folder in (out / "blobs", out / "blobs/sha256"):
        if folder.is_symlink() or not folder.is_dir():
            raise UserError(f"cannot pull {source}", f"skopeo made no folder {folder.relative_to(out)}")
    return out / "blobs/sha256"


def _document(source: Source, files: Path, document: Document, what: str) -> bytes:
    """The bytes of a small blob; UserError if they are not those of its digest."""
    try:
        fd = os.open(files / document.sha256, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0) as file:
            found = file.read(document.size + 1)
    except OSError as err:
        raise UserError(f"cannot pull {source}", f"its {what}: {err.strerror}") from err
    if len(found) != document.size or hashlib.sha256(found).hexdigest() != document.sha256:
        raise UserError(
            f"cannot pull {source}", f"its {what} has other bytes than its digest and its size say"
        )
    return found


def _check_manifest(source: Source, raw: bytes, image: Artifact) -> None:
    """UserError unless the vhpc manifest is sound and describes the same files as the registry's manifest."""
    try:
        manifest = decode_whole(raw)
    except ValueError as err:
        raise UserError(f"cannot pull {source}", f"its manifest: {err}") from err
    for part in ("kernel", "initrd", "root"):
        if getattr(manifest, part) != getattr(image, part):
            why = f"its {part} in the registry is not the one that its manifest describes"
            raise UserError(f"cannot pull {source}", why)


def _chunk_list(source: Source, raw: bytes, files: dict[str, Path], path: Path) -> dict[str, Path]:
    """The chunk list of the root, computed again, as a file to publish; none if the manifest has none.

    Raises:
        UserError: the manifest names another list.
    """
    (root,) = (blob for blob in blobs(decode_manifest(raw)) if blob.file == "root")
    if not root.chunks:
        return {}
    found = chunks.of_file(files[root.sha256], root.chunk_size)
    if hashlib.sha256(found).hexdigest() != root.chunks:
        raise UserError(f"cannot pull {source}", "its manifest names a chunk list that is not the root's")
    path.write_bytes(found)
    return {root.chunks: path}


def _checked(source: Source, files: Path, blob: Blob, count: Callable[[int], None]) -> Path:
    """The file of a blob; UserError unless it has the blob's bytes."""
    path = files / blob.sha256
    found = digest_of(path, count=count)
    if (found.sha256, found.size) != (blob.sha256, blob.size):
        expected = f"sha256:{blob.sha256} of {blob.size} bytes"
        why = f"its {blob.file}: expected {expected}, found sha256:{found.sha256} of {found.size} bytes"
        raise UserError(f"cannot pull {source}", why)
    return path
