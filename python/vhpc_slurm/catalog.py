# SPDX-License-Identifier: Apache-2.0
"""The image catalogue: resolves names to digests, and locates an image's blobs.

A name is resolved to a digest once, on the controller, when a lease is made;
nodes then fetch by digest.  The content of a catalogue is not trusted: a
manifest's bytes must match its digest, and each blob is verified before use
(by ``verify_blob`` here, or while the node's store copies it).  Layout and
manifest: docs/image-format.md.  An unknown or broken image is the user's
mistake: the job fails with one message, and no node is drained.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import DIGEST, IMAGE_NAME, IMAGE_TAG, Blob, ImageIdentity, ImageManifest, ImageRef

SCHEMA = 1
FIRMWARES = frozenset({"bios", "uefi"})
MANIFEST_LIMIT = 1 << 20
CHUNK = 1 << 20
NEAR_NAMES = 3
BOOT_FILE_LIMIT = 512 << 20
"""Maximum bytes of a kernel or initrd: each guest has copies in the node's memory."""


@dataclass(frozen=True)
class CatalogEntry:
    """One name of a catalogue.

    ``identity`` is None if the image is broken; ``problem`` then gives the reason in one line.
    """

    ref: ImageRef
    identity: ImageIdentity | None
    problem: str = ""


def resolve(catalog: Path, ref: ImageRef) -> ImageIdentity:
    """The image that a name refers to now.

    Raises:
        UserError: no such image (suggests similar names), or its manifest is broken.
        FabricError: the catalogue cannot be read.
    """
    try:
        digest = (catalog / "names" / ref.name / ref.tag).read_text(encoding="ascii").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise _unknown(catalog, ref) from None
    except UnicodeDecodeError:
        digest = ""
    except OSError as err:
        raise FabricError(f"cannot read the image catalogue {catalog}", str(err)) from err
    if not DIGEST.match(digest):
        raise UserError(f"image {ref} is broken", "its name file has no digest", "publish it again")
    return ImageIdentity(ref, digest, load_manifest(catalog, digest, str(ref)))


def load_manifest(catalog: Path, digest: str, image: str = "") -> ImageManifest:
    """The manifest with a digest, checked.

    Args:
        catalog: the catalogue.
        digest: ``sha256:`` and 64 hex digits.
        image: name of the image in error messages; default is the digest.

    Raises:
        UserError: it does not exist, does not match its digest, or has an unknown schema.
        FabricError: the catalogue cannot be read.
    """
    image = image or digest
    path = catalog / "manifests" / "sha256" / (digest.removeprefix("sha256:") + ".json")
    try:
        with path.open("rb") as file:
            raw = file.read(MANIFEST_LIMIT + 1)
    except FileNotFoundError:
        why = f"the catalogue has no manifest {digest}"
        raise UserError(f"image {image} is broken", why, "publish it again") from None
    except OSError as err:
        raise FabricError(f"cannot read the image catalogue {catalog}", str(err)) from err
    actual = "sha256:" + hashlib.sha256(raw).hexdigest()
    if actual != digest:
        why = f"manifest: expected {digest}, found {actual}"
        raise UserError(f"image {image} is broken", why, "publish it again")
    try:
        manifest = decode_manifest(raw)
    except ValueError as err:
        raise UserError(f"image {image} has an unusable manifest", str(err), "publish it again") from err
    return manifest


def decode_manifest(raw: bytes) -> ImageManifest:
    """A manifest's bytes, decoded strictly; ValueError if vhpc could not boot the image as described."""
    try:
        fields = msgspec.json.decode(raw)
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
        # msgspec ignores unknown keys of dataclasses; here one means a feature that this vhpc lacks.
        unknown = sorted(set(fields) - set(ImageManifest.__dataclass_fields__))
        if fields.get("schema") != SCHEMA:
            raise ValueError(f"schema {fields.get('schema')!r}, this vhpc knows {SCHEMA}")
        if unknown:
            raise ValueError(f"unknown key {unknown[0]}")
        manifest = msgspec.convert(fields, ImageManifest)
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err
    _check(manifest)
    return manifest


def list_images(catalog: Path) -> list[CatalogEntry]:
    """All names, sorted, including broken images; empty if the catalogue does not exist.

    Raises:
        FabricError: the catalogue cannot be read.
    """
    return [_entry(catalog, ref) for ref in _refs(catalog)]


def blobs(manifest: ImageManifest) -> tuple[Blob, Blob, Blob]:
    """Kernel, initrd and root."""
    return manifest.kernel, manifest.initrd, manifest.root


def blob_path(catalog: Path, blob: Blob) -> Path:
    """Path of a blob."""
    return catalog / "blobs" / "sha256" / blob.sha256


def verify_blob(catalog: Path, blob: Blob, image: str) -> None:
    """Check a blob's size and bytes (reads all of it).

    Raises:
        UserError: it is missing or differs; the message has the blob, the expected and the actual values.
        FabricError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with blob_path(catalog, blob).open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                size += len(chunk)
    except FileNotFoundError:
        why = f"{blob.file}: the catalogue has no blob sha256:{blob.sha256}"
        raise UserError(f"image {image} is broken", why, "publish it again") from None
    except OSError as err:
        raise FabricError(f"cannot read the image catalogue {catalog}", str(err)) from err
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


def _refs(catalog: Path) -> Iterator[ImageRef]:
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
    known = list(_refs(catalog))
    if not known:
        return UserError(f"image {ref} is unknown", f"the catalogue {catalog} is empty", "ask your operator")
    tags = [str(other) for other in known if other.name == ref.name]
    near = tags or difflib.get_close_matches(str(ref), [str(other) for other in known], n=NEAR_NAMES)
    hint = f"did you mean {' or '.join(near[:NEAR_NAMES])}? " if near else ""
    return UserError(f"image {ref} is unknown", hint=hint + "see: vhpc image ls")


def _check(manifest: ImageManifest) -> None:
    if not IMAGE_NAME.match(manifest.name) or not IMAGE_TAG.match(manifest.tag):
        raise ValueError(f"{manifest.name!r} with tag {manifest.tag!r} is not an image name")
    for blob in blobs(manifest):
        if not DIGEST.match(f"sha256:{blob.sha256}"):
            raise ValueError(f"{blob.file}: {blob.sha256!r} is not a sha256")
        if blob.size <= 0:
            raise ValueError(f"{blob.file}: its size is {blob.size} bytes")
        if blob is not manifest.root and blob.size > BOOT_FILE_LIMIT:
            raise ValueError(f"{blob.file}: more than {BOOT_FILE_LIMIT >> 20} MiB")
        if PurePosixPath(blob.file).name != blob.file:
            raise ValueError(f"{blob.file!r} is not a file name")
    # The planner checks whether a guest can mount it; here it only must be safe in a kernel command line.
    if not re.fullmatch(r"[a-z0-9]{1,32}", manifest.root_format, re.ASCII):
        raise ValueError(f"root format {manifest.root_format!r} is not a file system type")
    if manifest.firmware not in FIRMWARES:
        raise ValueError(f"firmware {manifest.firmware!r} is unknown")
    if manifest.init != "agent" and not manifest.init.startswith("/"):
        raise ValueError(f"init {manifest.init!r} is neither agent nor an absolute path")
    if manifest.min_memory_mib <= 0:
        raise ValueError(f"its minimum memory is {manifest.min_memory_mib} MiB")
    if not manifest.cmdline.isprintable():
        raise ValueError("the kernel command line has control characters")
