# SPDX-License-Identifier: Apache-2.0
"""Catalogues that are folders: resolves names to digests, and locates an image's blobs.

A name is resolved to a digest once, on the controller, when a lease is made;
nodes then fetch by digest.  The content of a catalogue is not trusted: a
manifest's bytes must match its digest, and each blob is verified before use
(by ``verify_blob`` here, or while the node's store copies it).  Layout and
manifest: docs/image-format.md.  An unknown or broken image is the user's
mistake: the job fails with one message, and no node is drained.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from vhpc_slurm import chunks
from vhpc_slurm.catalog.manifest import LIMIT, Manifest, decode_manifest, decode_whole
from vhpc_slurm.catalog.near import UnknownImageError
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import DIGEST, Blob, ImageIdentity, ImageManifest, ImageRef
from vhpc_slurm.record import Record

CHUNK = 1 << 20
NAME_SIZE = 80
"""Maximum bytes of a name's file, which has a digest and a line feed."""
SIGNATURES_SIZE = 64 << 10
"""Maximum bytes of the signatures of a manifest; what is beyond is not read."""


class _NoManifestError(UserError):
    """The catalogue has no manifest of a digest."""


class CatalogEntry(Record, frozen=True):
    """One name of a catalogue.

    ``identity`` is None if the image is broken; ``problem`` then gives the reason in one line.
    """

    ref: ImageRef
    identity: ImageIdentity | None
    problem: str = ""


class Signed(Record, frozen=True):
    """The bytes of a manifest, and its signatures in the text form of OpenSSH, one after the other."""

    manifest: bytes
    signatures: bytes


def resolve(catalog: Path, ref: ImageRef) -> ImageIdentity:
    """The image that a name refers to now, or the one of its digest.

    Raises:
        UserError: no such image (suggests similar names), or its manifest is broken.
        FabricError: the catalogue cannot be read.
    """
    digest = ref.digest or _digest_of(catalog, ref)
    try:
        raw = _read(catalog, digest, str(ref))
    except _NoManifestError as err:
        raise unknown_digest(ref) if ref.digest else err from None
    return identity(ref, digest, raw)


def identity(ref: ImageRef, digest: str, raw: bytes) -> ImageIdentity:
    """The image of a digest under a name, from its manifest's bytes.

    Raises:
        UserError: the bytes do not match the digest, or are not a manifest that vhpc accepts.
    """
    _check_digest(digest, raw, str(ref))
    return ImageIdentity(ref, digest, replace(_decoded(raw, str(ref)), name=ref.name, tag=ref.tag))


def _digest_of(catalog: Path, ref: ImageRef) -> str:
    try:
        digest = pointed_digest(name_file(catalog, ref))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise _unknown(catalog, ref) from None
    except OSError as err:
        raise FabricError(f"cannot read the image catalogue {catalog}", str(err)) from err
    if not digest:
        raise UserError(f"image {ref} is broken", "its name file has no digest", "publish it again")
    return digest


def name_file(catalog: Path, ref: ImageRef) -> Path:
    """Path of the file that has a name's digest."""
    return catalog / "names" / ref.name / ref.tag


def pointed_digest(path: Path) -> str:
    """The digest in a name's file; empty if there is none in it. Raises OSError."""
    with _open(path) as file:
        if not _is_regular(file):
            return ""
        text = file.read(NAME_SIZE).decode("ascii", "replace").strip()
    return text if DIGEST.match(text) else ""


def _open(path: Path) -> BinaryIO:
    """Open a file to read; a pipe is not waited for."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def _is_regular(file: BinaryIO) -> bool:
    return stat.S_ISREG(os.fstat(file.fileno()).st_mode)


def load_manifest(catalog: Path, digest: str, image: str = "") -> ImageManifest:
    """What a lease carries of the manifest with a digest; arguments and errors as ``read_manifest``."""
    raw = _read(catalog, digest, image or digest)
    _check_digest(digest, raw, image or digest)
    return _decoded(raw, image or digest)


def read_manifest(catalog: Path, digest: str, image: str = "") -> Manifest:
    """All that the manifest with a digest says.

    Args:
        catalog: the catalogue.
        digest: ``sha256:`` and 64 hex digits.
        image: name of the image in error messages; default is the digest.

    Raises:
        UserError: it does not exist, does not match its digest, or is not a manifest that vhpc accepts.
        FabricError: the catalogue cannot be read.
    """
    raw = _read(catalog, digest, image or digest)
    _check_digest(digest, raw, image or digest)
    try:
        return decode_whole(raw)
    except ValueError as err:
        raise _unusable(image or digest, err) from err


def read_signed(catalog: Path, image: ImageIdentity) -> Signed:
    """The manifest of an image and its signatures.

    Raises:
        UserError: the manifest does not exist, or does not match the image's digest.
        FabricError: the catalogue cannot be read.
    """
    raw = _read(catalog, image.digest, str(image.ref))
    _check_digest(image.digest, raw, str(image.ref))
    try:
        with _open(signatures_file(catalog, image.digest)) as file:
            signatures = file.read(SIGNATURES_SIZE) if _is_regular(file) else b""
    except FileNotFoundError:
        signatures = b""
    except OSError as err:
        raise FabricError(f"cannot read the image catalogue {catalog}", str(err)) from err
    return Signed(raw, signatures)


def manifest_file(catalog: Path, digest: str) -> Path:
    """Path of the manifest with a digest."""
    return catalog / "manifests" / "sha256" / f"{digest.removeprefix('sha256:')}.json"


def signatures_file(catalog: Path, digest: str) -> Path:
    """Path of the file with the signatures of the manifest with a digest."""
    return catalog / "signatures" / "sha256" / digest.removeprefix("sha256:")


def _decoded(raw: bytes, image: str) -> ImageManifest:
    try:
        return decode_manifest(raw)
    except ValueError as err:
        raise _unusable(image, err) from err


def _unusable(image: str, err: ValueError) -> UserError:
    return UserError(f"image {image} has an unusable manifest", str(err), "publish it again")


def _read(catalog: Path, digest: str, image: str) -> bytes:
    """The bytes that the catalogue has for a digest."""
    try:
        with _open(manifest_file(catalog, digest)) as file:
            if not _is_regular(file):
                why = f"the manifest {digest} is not a regular file"
                raise UserError(f"image {image} is broken", why, "publish it again")
            return file.read(LIMIT + 1)
    except FileNotFoundError:
        why = f"the catalogue has no manifest {digest}"
        raise _NoManifestError(f"image {image} is broken", why, "publish it again") from None
    except OSError as err:
        raise FabricError(f"cannot read the image catalogue {catalog}", str(err)) from err


def _check_digest(digest: str, raw: bytes, image: str) -> None:
    actual = "sha256:" + hashlib.sha256(raw).hexdigest()
    if actual != digest:
        why = f"manifest: expected {digest}, found {actual}"
        raise UserError(f"image {image} is broken", why, "publish it again")


def list_images(catalog: Path) -> list[CatalogEntry]:
    """All names, sorted, including broken images; empty if the catalogue does not exist.

    Raises:
        FabricError: the catalogue cannot be read.
    """
    return [_entry(catalog, ref) for ref in refs(catalog)]


def labels(catalog: Path, image: ImageIdentity) -> list[str]:
    """Names under which an image is known, as NAME:TAG.

    An image that was found by its name has this one; one that was found by its digest, all that
    point to the digest now, since the name that was written beside it may be any.

    Raises:
        FabricError: the catalogue cannot be read.
    """
    if not image.ref.digest:
        return [image.ref.label]
    found = []
    for ref in refs(catalog):
        with contextlib.suppress(OSError):  # a name that was removed, or that is no file
            if pointed_digest(name_file(catalog, ref)) == image.digest:
                found.append(ref.label)
    return found


def blobs(manifest: ImageManifest) -> tuple[Blob, Blob, Blob]:
    """Kernel, initrd and root."""
    return manifest.kernel, manifest.initrd, manifest.root


def chunk_list(blob: Blob) -> Blob | None:
    """The chunk list of a blob, itself a blob of the catalogue; None if it has none."""
    if not blob.chunks:
        return None
    return Blob(f"chunk list of {blob.file}", blob.chunks, chunks.list_size(blob.size, blob.chunk_size))


def with_list(manifest: ImageManifest) -> tuple[Blob, ...]:
    """Kernel, initrd, root, and the chunk list of the root, if it has one."""
    found = chunk_list(manifest.root)
    return (*blobs(manifest), *([found] if found else ()))


def blob_path(catalog: Path, blob: Blob) -> Path:
    """Path of a blob."""
    return catalog / "blobs" / "sha256" / blob.sha256


def verify_blob(catalog: Path, blob: Blob, image: str, count: Callable[[int], None] = lambda _: None) -> None:
    """Check a blob's size and bytes (reads all of it).

    ``count`` gets the number of bytes of each piece that was read.

    Raises:
        UserError: it is missing or differs; the message has the blob, the expected and the actual values.
        FabricError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with _open(blob_path(catalog, blob)) as file:
            if not _is_regular(file):
                why = f"{blob.file}: blob sha256:{blob.sha256} is not a regular file"
                raise UserError(f"image {image} is broken", why, "publish it again")
            while size <= blob.size and (chunk := file.read(CHUNK)):
                digest.update(chunk)
                size += len(chunk)
                count(len(chunk))
    except FileNotFoundError:
        why = f"{blob.file}: the catalogue has no blob sha256:{blob.sha256}"
        raise UserError(f"image {image} is broken", why, "publish it again") from None
    except OSError as err:
        raise FabricError(f"cannot read the image catalogue {catalog}", str(err)) from err
    if size > blob.size:
        why = f"{blob.file}: expected {blob.size} bytes, found more"
        raise UserError(f"image {image} is broken", why, "publish it again")
    if size != blob.size or digest.hexdigest() != blob.sha256:
        raise UserError(
            f"image {image} is broken",
            f"{blob.file}: expected sha256:{blob.sha256} of {blob.size} bytes, "
            f"found sha256:{digest.hexdigest()} of {size} bytes",
            "publish it again",
        )


def _entry(catalog: Path, ref: ImageRef) -> CatalogEntry:
    try:
        return CatalogEntry(ref, resolve(catalog, ref))
    except UserError as err:
        return CatalogEntry(ref, None, err.line())


def refs(catalog: Path) -> Iterator[ImageRef]:
    """All names, sorted; FabricError if the catalogue cannot be read."""
    names = catalog / "names"
    try:
        for name in sorted(path for path in names.iterdir() if path.is_dir()):
            for tag in sorted(path.name for path in name.iterdir()):
                try:
                    yield ImageRef.parse(f"{name.name}:{tag}")
                except UserError:
                    continue  # a file that is being written, or not one of vhpc's
    except FileNotFoundError:
        return
    except OSError as err:
        raise FabricError(f"cannot read the image catalogue {catalog}", str(err)) from err


def _unknown(catalog: Path, ref: ImageRef) -> UserError:
    known = [replace(other, own=ref.own) for other in refs(catalog)]
    return UnknownImageError(ref, known, "" if known else f"the catalogue {catalog}")


def unknown_digest(ref: ImageRef) -> UserError:
    """The error for a digest that the user has written, and that no image has."""
    return UserError(
        f"image {ref} is unknown",
        "the catalogue has no image of this digest: it is mistyped, or the image was removed",
        f"the digest that the name has now: vhpc image show {ref.label}",
    )
