# SPDX-License-Identifier: Apache-2.0
"""vhpc image: the images of the catalogue, and which of them this node has stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from vhpc_slurm.catalog import CatalogEntry, blobs, list_images, resolve
from vhpc_slurm.cli import output
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageIdentity, ImageManifest, ImageRef
from vhpc_slurm.node.store import images
from vhpc_slurm.node.store.layout import Layout

PARTS = ("kernel", "initrd", "root")


def ls(config: Config, name: str | None, *, as_json: bool) -> int:
    """Show all images of the catalogue, or the tags of one name.

    Raises:
        UserError: the catalogue has no image of that name.
    """
    wanted = None if name is None else ImageRef.parse(name).name
    found = [entry for entry in list_images(Path(config.images.catalog)) if wanted in (None, entry.ref.name)]
    if wanted is not None and not found:
        raise UserError(f"the catalogue has no image {wanted!r}", "", "see: vhpc image ls")
    on_node = _stored(config)
    if as_json:
        output.write_json([_entry_json(entry, on_node) for entry in found])
        return 0
    output.write_table(
        ("IMAGE", "DIGEST", "SIZE", "MIN MEMORY", "CREATED", "HERE", "DESCRIPTION"),
        [_row(entry, on_node) for entry in found],
        right=("SIZE", "MIN MEMORY"),
    )
    return 0


def _row(entry: CatalogEntry, on_node: set[str]) -> tuple[str, ...]:
    if entry.identity is None:
        return str(entry.ref), "-", "-", "-", "-", "-", f"BROKEN: {entry.problem}"
    manifest = entry.identity.manifest
    return (
        str(entry.ref),
        entry.identity.digest[:19],
        output.size(_size(manifest)),
        f"{manifest.min_memory_mib} MiB",
        manifest.created or "-",
        "yes" if _is_here(manifest, on_node) else "no",
        manifest.description,
    )


def show(config: Config, text: str, *, as_json: bool) -> int:
    """Show one image; UserError when the catalogue has no image of that name."""
    image = resolve(Path(config.images.catalog), ImageRef.parse(text))
    on_node = _stored(config)
    if as_json:
        output.write_json(_json(image, on_node))
        return 0
    manifest = image.manifest
    facts = [
        ("image", str(image.ref)),
        ("digest", image.digest),
        ("description", manifest.description),
        ("created", manifest.created),
        ("size", output.size(_size(manifest))),
        ("min memory", f"{manifest.min_memory_mib} MiB"),
        ("arch", manifest.arch),
        ("firmware", manifest.firmware),
        ("root format", manifest.root_format),
        ("init", manifest.init),
        ("command line", manifest.cmdline),
        ("drivers", ", ".join(manifest.drivers)),
        ("agent", manifest.agent_version),
        ("signature", manifest.signature or "none"),
    ]
    output.write_facts([(name, value or "-") for name, value in facts])
    print()
    output.write_table(
        ("BLOB", "FILE", "SIZE", "SHA256", "HERE"),
        [
            (part, blob.file, output.size(blob.size), blob.sha256, "yes" if blob.sha256 in on_node else "no")
            for part, blob in zip(PARTS, blobs(manifest), strict=True)
        ],
        right=("SIZE",),
    )
    return 0


def _size(manifest: ImageManifest) -> int:
    return sum(blob.size for blob in blobs(manifest))


def _stored(config: Config) -> set[str]:
    """sha256 of the blobs in this node's store."""
    return {sha256 for sha256, _ in images.stored(Layout(config))}


def _is_here(manifest: ImageManifest, on_node: set[str]) -> bool:
    return all(blob.sha256 in on_node for blob in blobs(manifest))


def _entry_json(entry: CatalogEntry, on_node: set[str]) -> dict[str, Any]:
    if entry.identity is None:
        return {"image": str(entry.ref), "digest": None, "problem": entry.problem}
    return _json(entry.identity, on_node)


def _json(image: ImageIdentity, on_node: set[str]) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(image.manifest)
    return built | {
        "image": str(image.ref),
        "digest": image.digest,
        "size": _size(image.manifest),
        "here": _is_here(image.manifest, on_node),
        "problem": None,
    }
