# SPDX-License-Identifier: Apache-2.0
"""The image of a source in the user's own catalogue: the one that is there, or a new import."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from vhpc_slurm import files
from vhpc_slurm.catalog import blob_path, blobs, read_manifest, resolve
from vhpc_slurm.catalog.changes import changing
from vhpc_slurm.catalog.manifest import Manifest
from vhpc_slurm.catalog.publish import prepare
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.importing.identify import identify
from vhpc_slurm.importing.imports import (
    KERNEL_LABEL,
    REGISTRY_LABEL,
    check_source,
    import_image,
    kernel_of_site,
)
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import Blob, ImageRef

SLUG_SIZE = 48
LOCK = ".sources.lock"


def image_of(images: Images, source: Source, catalog: Path, progress: Callable[[str], None]) -> str:
    """``own/NAME:TAG@sha256:…`` of a source; it is imported if the catalogue does not have it.

    It has it if the source states the digest of its content (a container does, a tar or a folder
    does not), and the image with this digest and today's kernel of the site is under the source's name.
    Imports of one catalogue wait for each other, so that a source is imported once.

    Args:
        images: the site's configuration.
        source: what the user named.
        catalog: the user's own.
        progress: gets a line for each step.

    Raises:
        UserError: the source is refused, or the catalogue cannot be changed.
        FabricError: the site's catalogue cannot be read.
    """
    check_source(source)
    target = ImageRef(name_for(source), own=True)
    prepare(catalog)
    with _alone(catalog, images.import_timeout_s, progress):
        digest = identify(source, images.import_timeout_s)
        known = _known(images, catalog, target, digest) if digest else ""
        if known:
            progress(f"{source} is {target.label} already")
            return f"{target.label}@{known}"
        if source.kind == "docker":
            source = replace(source, digest=digest)
        done = import_image(images, source, target, catalog, "", progress)
        progress(f"{source} is {target.label} now")
    return f"{target.label}@{done.digest}"


def name_for(source: Source) -> str:
    """A name for an image of a source: readable, and another one for each source."""
    text = source.name if source.kind == "docker" else f"{source.path.name}-{source.name}"
    slug = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[-SLUG_SIZE:].lstrip("-.")
    return "-".join(filter(None, (slug, hashlib.sha256(str(source).encode()).hexdigest()[:8])))


@contextlib.contextmanager
def _alone(catalog: Path, timeout_s: float, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of imports by source."""
    with changing(catalog):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(catalog / LOCK, flags, 0o600)
    try:
        if not files.try_lock(lock):
            progress("waiting for another import into your catalogue")
            if not files.lock(lock, timeout_s):
                why = f"another import has not ended for {timeout_s:.0f} s"
                raise UserError(f"the image catalogue {catalog} is in use", why, "try again later")
        yield
    finally:
        os.close(lock)


def _known(images: Images, catalog: Path, target: ImageRef, digest: str) -> str:
    """The digest of the image under this name, if it was made of that content and all of it is there."""
    kernel = str(kernel_of_site(images, "").image)
    try:
        image = resolve(catalog, ImageRef(target.name, target.tag))
        manifest = read_manifest(catalog, image.digest)
    except VhpcError:
        return ""
    if not isinstance(manifest, Manifest) or manifest.labels.get(KERNEL_LABEL) != kernel:
        return ""
    if digest not in (manifest.labels.get(REGISTRY_LABEL), manifest.provenance.source_digest):
        return ""
    return image.digest if all(_is_there(catalog, blob) for blob in blobs(image.manifest)) else ""


def _is_there(catalog: Path, blob: Blob) -> bool:
    try:
        return blob_path(catalog, blob).stat().st_size == blob.size
    except OSError:
        return False
