# SPDX-License-Identifier: Apache-2.0
"""vhpc image: the images of the catalogue, and which of them this node has stored."""

from __future__ import annotations

import contextlib
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from vhpc_slurm.architecture import X86_64
from vhpc_slurm.catalog import (
    CatalogEntry,
    Manifest,
    UnknownImageError,
    blobs,
    own_catalog,
)
from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.options import CatalogFolder, ImageArgument, Json, Own
from vhpc_slurm.config import Config
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.importing.owncommands import COMMANDS_LABEL
from vhpc_slurm.model import ImageIdentity, ImageManifest, ImageRef
from vhpc_slurm.node.store import images
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.terminal import one_line, short_digests

PARTS = ("kernel", "initrd", "root")


def ls(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Only the tags of this name."),
    ] = None,
    own: Own = False,
    catalog: CatalogFolder = None,
    as_json: Json = False,
) -> int:
    """List the images of the site; with --own, yours."""
    config = options.config()
    where = options.catalog(config, catalog, *([name] if name else []), own=own)
    is_own = own or (name or "").startswith("own/")
    wanted = None if name is None else ImageRef.parse(name).name
    found = [
        replace(entry, ref=replace(entry.ref, own=is_own))
        for entry in where.images()
        if wanted in (None, entry.ref.name)
    ]
    if wanted is not None and not found:
        raise UnknownImageError(ImageRef(wanted, own=is_own), where.refs())
    on_node = _stored(config)
    if as_json:
        output.write_json([_entry_json(entry, on_node) for entry in found])
        return 0
    head: tuple[str, ...] = ("IMAGE", "DIGEST", "SIZE", "MIN MEMORY", "CREATED", "HERE", "DESCRIPTION")
    rows = [_row(entry, on_node) for entry in found]
    kinds = [entry.identity.manifest.arch if entry.identity else "-" for entry in found]
    if set(kinds) - {"-", X86_64.name}:  # on other sites it would be a column of equal words
        head = ("IMAGE", "ARCH", *head[1:])
        rows = [(row[0], kind, *row[1:]) for row, kind in zip(rows, kinds, strict=True)]
    output.write_table(head, rows, right=("SIZE", "MIN MEMORY"))
    if not is_own and wanted is None and where.path == Path(config.images.catalog):
        _mention_own(config)
    return 0


def _mention_own(config: Config) -> None:
    """Say that the user has images of their own, which the list of the site's does not show."""
    count = 0
    with contextlib.suppress(VhpcError):
        if config.images.user_catalog:
            count = sum(1 for _ in own_catalog(config.images, context.user_name()).refs())
    if count:
        are = "1 image of your own is" if count == 1 else f"{count} images of your own are"
        print(f"vhpc: {are} not in this list, see: vhpc image ls --own", file=sys.stderr)


def _row(entry: CatalogEntry, on_node: set[str]) -> tuple[str, ...]:
    if entry.identity is None:
        return str(entry.ref), "-", "-", "-", "-", "-", f"BROKEN: {entry.problem}"
    manifest = entry.identity.manifest
    return (
        str(entry.ref),
        short_digests(entry.identity.digest),
        output.size(_size(manifest)),
        f"{manifest.min_memory_mib} MiB",
        manifest.created or "-",
        "yes" if _is_here(manifest, on_node) else "no",
        manifest.description,
    )


def show(name: ImageArgument, catalog: CatalogFolder = None, as_json: Json = False) -> int:
    """Show one image: its digest, what its manifest says, and its blobs."""
    config = options.config()
    where = options.catalog(config, catalog, name)
    image = where.resolve(ImageRef.parse(name))
    whole = where.read_manifest(image.digest, str(image.ref))
    on_node = _stored(config)
    if as_json:
        output.write_json(_json(image, on_node) | msgspec.to_builtins(whole))
        return 0
    manifest = image.manifest
    facts = [
        ("image", str(image.ref)),
        ("digest", image.digest),
        ("schema", str(manifest.schema)),
        ("description", manifest.description),
        ("created", manifest.created),
        ("size", output.size(_size(manifest))),
        ("min memory", f"{manifest.min_memory_mib} MiB"),
        ("min CPUs", str(manifest.min_cpus)),
        ("arch", manifest.arch),
        ("firmware", manifest.firmware),
        ("root format", manifest.root_format),
        ("init", manifest.init),
        ("command line", manifest.cmdline),
        ("drivers", ", ".join(f"{name} {version}".rstrip() for name, version in whole.drivers.items())),
        ("agent", manifest.agent_version),
        *_more(whole),
    ]
    output.write_facts([(name, value or "-") for name, value in facts])
    print()
    formats = (whole.kernel.media_type, whole.initrd.media_type, whole.root.media_type)
    output.write_table(
        ("BLOB", "FORMAT", "SIZE", "SHA256", "HERE"),
        [
            (part, form, output.size(blob.size), blob.sha256, "yes" if blob.sha256 in on_node else "no")
            for part, form, blob in zip(PARTS, formats, blobs(manifest), strict=True)
        ],
        right=("SIZE",),
    )
    return 0


def _more(whole: Manifest) -> list[tuple[str, str]]:
    """Values of a manifest that a lease does not carry."""
    origin, process = whole.provenance, whole.process
    return [
        ("entrypoint", shlex.join([*process.entrypoint, *process.arguments])),
        (
            "environment",
            " ".join(f"{name}={one_line(shlex.quote(text))}" for name, text in process.environment.items()),
        ),
        ("user", process.user),
        ("directory", process.working_dir),
        ("builder", origin.builder),
        ("source", " ".join(filter(None, (origin.source, origin.source_digest)))),
        ("parent", origin.parent),
        ("covered", whole.labels.get(COMMANDS_LABEL, "")),
        ("labels", ", ".join(f"{key}={text}" for key, text in whole.labels.items())),
        ("root hash", f"{whole.verity.algorithm}:{whole.verity.root_hash}" if whole.verity else ""),
    ]


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
    return _json(replace(entry.identity, ref=entry.ref), on_node)


def _json(image: ImageIdentity, on_node: set[str]) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(image.manifest)
    return built | {
        "image": str(image.ref),
        "digest": image.digest,
        "size": _size(image.manifest),
        "here": _is_here(image.manifest, on_node),
        "problem": None,
    }
