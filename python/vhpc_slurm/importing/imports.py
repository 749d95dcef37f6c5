# SPDX-License-Identifier: Apache-2.0
"""Makes an image of a source: its files become the root, a kernel of the site boots it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vhpc_slurm.catalog import resolve
from vhpc_slurm.catalog.changes import staging
from vhpc_slurm.catalog.folder import read_manifest
from vhpc_slurm.catalog.manifest import Manifest, Process
from vhpc_slurm.catalog.publish import copy_blob, digest_of, prepare, publish
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.fetch import fetch
from vhpc_slurm.importing.sandbox import run_worker
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import ImageIdentity, ImageRef

BUILDER = "vhpc image import"
ROOT_TYPE = "application/vnd.vhpc.root.erofs"
MEMORY_MAX = 16 << 30
"""Bytes of address space of the process that reads a source."""


@dataclass(frozen=True)
class Imported:
    """An image that was imported.

    Attributes:
        image: its name.
        digest: of the image.
        source_digest: of what was imported; empty if it has none, as folders.
        changed: whether the name pointed to another image before.
        special: number of devices and pipes that were left out.
        size: bytes of the root.
    """

    image: str
    digest: str
    source_digest: str
    changed: bool
    special: int
    size: int


def import_image(
    images: Images,
    source: Source,
    target: ImageRef,
    catalog: Path,
    kernel: str,
    progress: Callable[[str], None],
) -> Imported:
    """Import a source into a catalogue.

    Args:
        images: the site's configuration.
        source: what to import; read with the caller's rights.
        target: name of the image.
        catalog: where to put it; made if it does not exist.
        kernel: image of the site whose kernel and initrd the image gets; empty: the site's choice.
        progress: gets a line for each step.

    Raises:
        UserError: the source is refused, the site has no such kernel, or the catalogue cannot be changed.
        FabricError: the site's catalogue cannot be read.
    """
    if target.digest:
        raise UserError(f"{target} cannot be a new name", "it has a digest", "write [own/]NAME[:TAG]")
    base_ref, base = _base(images, kernel)
    if source.kind != "docker" and not source.path.exists():
        raise UserError(f"cannot import {source}", f"{source.path} does not exist")
    prepare(catalog)
    with staging(catalog) as folder:
        out = folder / "out"
        out.mkdir()
        request = {
            "max_bytes": images.import_max_mib << 20,
            "max_files": images.import_max_files,
            "max_memory": MEMORY_MAX,
            "timeout_s": images.import_timeout_s,
        }
        found = run_worker(
            _local(source, folder, images, progress), out, request, images.import_timeout_s, progress
        )
        progress("publishing")
        root = digest_of(out / "root.erofs")
        new = {root.sha256: out / "root.erofs"}
        site = Path(images.catalog)
        for blob in (base_ref.manifest.kernel, base_ref.manifest.initrd):
            if copy_blob(site, catalog, blob, folder / blob.file):
                new[blob.sha256] = folder / blob.file
        made = {"media_type": ROOT_TYPE, "sha256": root.sha256, "size": root.size}
        manifest = _manifest(base, str(base_ref), source, found, made)
        done = publish(catalog, target, manifest, new)
    source_digest, special = found.get("digest"), found.get("special")
    return Imported(
        image=target.label,
        digest=done.digest,
        source_digest=source_digest if isinstance(source_digest, str) else "",
        changed=done.changed,
        special=special if isinstance(special, int) else 0,
        size=root.size,
    )


def _local(source: Source, folder: Path, images: Images, progress: Callable[[str], None]) -> Source:
    """The source as files: an image of a registry is fetched."""
    if source.kind != "docker":
        return source
    fetched = folder / "fetched"
    fetched.mkdir()
    progress(f"fetching {source}")
    fetch(source.name, fetched, images.import_max_mib << 20, images.import_timeout_s, progress)
    return Source("fetched", fetched, source.name)


def _base(images: Images, kernel: str) -> tuple[ImageIdentity, Manifest]:
    """The image of the site that gives the kernel, and all of its manifest."""
    name = kernel or images.import_kernel
    if not name:
        raise UserError(
            "cannot import an image",
            "the site has not chosen a kernel for imports (images.import_kernel)",
            "choose an image of the site whose kernel you want: --kernel NAME",
        )
    site = Path(images.catalog)
    ref = ImageRef.parse(name)
    if ref.own:
        raise UserError(
            f"the image {ref} cannot give a kernel",
            "kernels are those of the site's images",
            "see: vhpc image ls",
        )
    image = resolve(site, ref)
    manifest = read_manifest(site, image.digest, str(image.ref))
    if not isinstance(manifest, Manifest):
        raise UserError(
            f"the image {image.ref} cannot give a kernel", "its manifest is of schema 1", "publish it again"
        )
    return image, manifest


def _manifest(
    base: Manifest, base_name: str, source: Source, found: dict[str, Any], root: dict[str, Any]
) -> dict[str, Any]:
    """The manifest; UserError if the worker's result does not fit into one."""
    built: dict[str, Any] = msgspec.to_builtins(base)
    empty = msgspec.to_builtins(Process(entrypoint=(), arguments=(), environment={}, user="", working_dir=""))
    digest = found.get("digest") or ""
    origin = {
        "builder": BUILDER,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "parent": "",
        "source": source.label,
        "source_digest": digest,
    }
    try:
        process = msgspec.convert(empty | (found.get("process") or {}), Process)
    except (msgspec.ValidationError, TypeError) as err:
        raise UserError(f"cannot import {source}", f"its configuration: {err}") from err
    return built | {
        "init": "agent",
        "description": f"imported from {origin['source']}"[:1024],
        "drivers": {},
        "labels": {"vhpc/kernel-image": base_name},
        "process": msgspec.to_builtins(process),
        "provenance": origin,
        "root": root,
    }
