# SPDX-License-Identifier: Apache-2.0
"""The image of a source in the user's own catalogue: the one that is there, or a new import."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from vhpc_slurm.catalog import FolderCatalog, blobs
from vhpc_slurm.catalog.publish import has_blob, prepare
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.importing.alone import alone
from vhpc_slurm.importing.identify import identify
from vhpc_slurm.importing.imports import (
    KERNEL_LABEL,
    REGISTRY_LABEL,
    check_source,
    import_image,
    kernel_of_site,
)
from vhpc_slurm.importing.offer import Artifact, look
from vhpc_slurm.importing.pull import is_whole, take
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import ImageRef

SLUG_SIZE = 48


def image_of(
    images: Images,
    source: Source,
    catalog: Path,
    progress: Callable[[str], None],
    commands: Sequence[str] = (),
) -> str:
    """``own/NAME:TAG@sha256:…`` of a source; it is imported, or pulled, if the catalogue does not have it.

    It has it if the source states the digest of its content (a container does, a tar or a folder
    does not), and the image with this digest and today's kernel of the site is under the source's name.
    Imports of one catalogue wait for each other, so that a source is imported once.

    Args:
        images: the site's configuration.
        source: what the user named.
        catalog: the user's own.
        progress: gets a line for each step.
        commands: as for ``import_image``.

    Raises:
        UserError: the source is refused, or the catalogue cannot be changed.
        FabricError: the site's catalogue cannot be read.
    """
    check_source(source)
    target = ImageRef(name_for(source), own=True)
    prepare(catalog)
    with alone(catalog, images.import_timeout_s, progress):
        if source.kind == "docker":
            offer = look(source, images.import_timeout_s)
            if offer.image is not None:
                return _pulled(images, offer.source, offer.image, target, catalog, progress)
            digest = offer.digest
        else:
            arch = kernel_of_site(images, "").manifest.arch
            digest = identify(replace(source, arch=arch), images.import_timeout_s)
        known = _known(images, catalog, target, digest) if digest else ""
        if known:
            progress(f"{source} is {target.label} already")
            return f"{target.label}@{known}"
        if source.kind == "docker":
            source = replace(source, digest=digest)
        done = import_image(images, source, target, catalog, "", progress, commands=commands)
        progress(f"{source} is {target.label} now")
    return f"{target.label}@{done.digest}"


def name_for(source: Source) -> str:
    """A name for an image of a source: readable, and another one for each source."""
    text = source.name if source.kind == "docker" else f"{source.path.name}-{source.name}"
    slug = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[-SLUG_SIZE:].lstrip("-.")
    return "-".join(filter(None, (slug, hashlib.sha256(str(source).encode()).hexdigest()[:8])))


def _pulled(
    images: Images,
    source: Source,
    image: Artifact,
    target: ImageRef,
    catalog: Path,
    progress: Callable[[str], None],
) -> str:
    """The same for a vhpc image of a registry, which keeps its digest; errors as ``image_of``."""
    if is_whole(catalog, target, image):
        progress(f"{source} is {target.label} already")
    else:
        take(images, source, image, target, catalog, progress)
        progress(f"{source} is {target.label} now")
    return f"{target.label}@{image.digest}"


def _known(images: Images, catalog: Path, target: ImageRef, digest: str) -> str:
    """The digest of the image under this name, if it was made of that content and all of it is there."""
    base = kernel_of_site(images, "")
    kernel = str(base.image)
    try:
        image = FolderCatalog(catalog).resolve(ImageRef(target.name, target.tag), base.manifest.arch)
        manifest = FolderCatalog(catalog).read_manifest(image.digest)
    except VhpcError:
        return ""
    if manifest.labels.get(KERNEL_LABEL) != kernel:
        return ""
    if digest not in (manifest.labels.get(REGISTRY_LABEL), manifest.provenance.source_digest):
        return ""
    return image.digest if all(has_blob(catalog, blob) for blob in blobs(image.manifest)) else ""
