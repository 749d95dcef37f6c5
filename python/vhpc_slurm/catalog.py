# SPDX-License-Identifier: Apache-2.0
"""The image catalogue: what a name means, and where an image's bytes are.

Names resolve to a digest once, on the controller, when a lease is made; nodes
then fetch by digest.  Nothing in a catalogue is believed: a manifest's bytes
must have the digest it is filed under, and each blob is checked by whoever
uses it (``verify_blob`` here, or the node's store on the way in).  Layout and
manifest: docs/image-format.md.  An image that is unknown or broken is its
user's matter: his job fails with one line, and no node is drained.
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
"""Bytes of a kernel or an initrd: each guest has copies of them, in the node's memory."""


@dataclass(frozen=True)
class CatalogEntry:
    """One name of a catalogue.

    ``identity`` is None when the image is broken; ``problem`` then says how, in one line.
    """

    ref: ImageRef
    identity: ImageIdentity | None
    problem: str = ""


def resolve(catalog: Path, ref: ImageRef) -> ImageIdentity:
    """The image that a name means now.

    Raises:
        UserError: no such image (names near ones), or its manifest is broken.
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
        raise UserError(f"image {ref} is broken", "its name holds no digest", "publish it again")
    return ImageIdentity(ref, digest, load_manifest(catalog, digest, str(ref)))


def load_manifest(catalog: Path, digest: str, image: str = "") -> ImageManifest:
    """The manifest with a digest, checked.

    Args:
        catalog: the catalogue.
        digest: ``sha256:`` and 64 hex digits.
        image: what error messages call the image; default is the digest.

    Raises:
        UserError: it is not there, not what its digest says, or no manifest of a known schema.
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
    """A manifest's bytes, decoded strictly; ValueError for anything that we could not boot as it says."""
    try:
        fields = msgspec.json.decode(raw)
        if not isinstance(fields, dict):
            raise ValueError("it is no JSON object")
        # Dataclasses let unknown keys pass; here one means that the writer expects what we cannot do.
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
    """All names, sorted, broken images among them.

    Raises:
        FabricError: the catalogue cannot be read.  One that is not there is empty.
    """
    return [_entry(catalog, ref) for ref in _refs(catalog)]


def blobs(manifest: ImageManifest) -> tuple[Blob, Blob, Blob]:
    """Kernel, initrd and root."""
    return manifest.kernel, manifest.initrd, manifest.root


def blob_path(catalog: Path, blob: Blob) -> Path:
    """Where a blob is."""
    return catalog / "blobs" / "sha256" / blob.sha256


def verify_blob(catalog: Path, blob: Blob, image: str) -> None:
    """Check a blob's size and bytes (reads all of it).

    Raises:
        UserError: it is missing or differs; names the blob, what was expected and what is there.
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
                    continue  # a file being written, or one that is none of ours
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
            raise ValueError(f"{blob.file}: {blob.sha256!r} is no sha256")
        if blob.size <= 0:
            raise ValueError(f"{blob.file}: a size of {blob.size} bytes")
        if blob is not manifest.root and blob.size > BOOT_FILE_LIMIT:
            raise ValueError(f"{blob.file}: more than {BOOT_FILE_LIMIT >> 20} MiB")
        if PurePosixPath(blob.file).name != blob.file:
            raise ValueError(f"{blob.file!r} is no file name")
    # Whether a guest can mount it is for the planner to say; here it must be a word of a kernel command line.
    if not re.fullmatch(r"[a-z0-9]{1,32}", manifest.root_format, re.ASCII):
        raise ValueError(f"root format {manifest.root_format!r} is no file system type")
    if manifest.firmware not in FIRMWARES:
        raise ValueError(f"firmware {manifest.firmware!r} is unknown")
    if manifest.init != "agent" and not manifest.init.startswith("/"):
        raise ValueError(f"init {manifest.init!r} is neither agent nor an absolute path")
    if manifest.min_memory_mib <= 0:
        raise ValueError(f"a minimum memory of {manifest.min_memory_mib} MiB")
    if not manifest.cmdline.isprintable():
        raise ValueError("the kernel command line has control characters")
