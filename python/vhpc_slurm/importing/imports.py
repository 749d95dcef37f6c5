# SPDX-License-Identifier: Apache-2.0
"""Makes an image of a source: its files become the root, and the kernel of another image boots it."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from vhpc_slurm import chunks
from vhpc_slurm.architecture import KERNEL_TYPE, named
from vhpc_slurm.bootfiles.verity import PACKAGE, TOOL, find_tool
from vhpc_slurm.catalog import Catalog, SeveralArchitecturesError, blobs, site_catalog
from vhpc_slurm.catalog.changes import check_new_name, staging
from vhpc_slurm.catalog.manifest import Manifest, Process
from vhpc_slurm.catalog.publish import copy_blob, digest_of, prepare, publish
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.fetch import fetch
from vhpc_slurm.importing.keptdrivers import kept
from vhpc_slurm.importing.offer import look, refuse_image
from vhpc_slurm.importing.origin import created, date, origin
from vhpc_slurm.importing.owncommands import COMMANDS_LABEL, covered_label
from vhpc_slurm.importing.process import OF_VHPC
from vhpc_slurm.importing.sandbox import run_worker
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import Blob, ImageIdentity, ImageRef
from vhpc_slurm.progress import counter

MADE = {
    "root": ("root.erofs", "application/vnd.vhpc.root.erofs"),
    "kernel": ("kernel", ""),
    "initrd": ("initrd", "application/vnd.vhpc.initrd.cpio"),
}
"""Files that the worker makes: key of the manifest -> file and media type, which depends on the architecture
for a kernel. Kernel and initrd only if the source has a kernel of its own."""
OWN_INIT_MEMORY_MIB = 512
"""Memory that a whole system with systemd needs at least."""
KERNEL_LABEL, REGISTRY_LABEL = "vhpc/kernel-image", "vhpc/registry-digest"
"""Labels of imported images: the image that gave the kernel; the digest that a registry was asked for."""
MEMORY_MAX = 16 << 30
"""Bytes of address space of the process that reads a source."""


@dataclass(frozen=True)
class Parent:
    """An image whose kernel another one gets.

    Attributes:
        image: as a lease names it.
        manifest: all of its manifest.
        catalog: the catalogue that has it.
    """

    image: ImageIdentity
    manifest: Manifest
    catalog: Catalog


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
    labels: Mapping[str, str] = MappingProxyType({}),
    commands: Sequence[str] = (),
    arch: str = "",
) -> Imported:
    """Import a source into a catalogue.

    Args:
        images: the site's configuration.
        source: the source to import; read with the caller's rights.
        target: name of the image.
        catalog: where to put it; made if it does not exist.
        kernel: image of the site whose kernel and initrd the image gets; empty: the site's choice.
        progress: gets a line for each step.
        labels: of the image, in addition to those of the container.
        commands: names of commands that run on the host, ``host.commands``: files of the image with these
            names are told and noted, because guests cover them.
        arch: of the image; empty: that of the kernel, or this host's if there are several.

    Raises:
        UserError: the source is refused, the site has no such kernel, or the catalogue cannot be changed.
        FabricError: the site's catalogue cannot be read.
    """
    base = kernel_of_site(images, kernel, arch)
    source = replace(source, arch=base.manifest.arch)
    check_source(source)
    with _made_in(catalog, target) as folder:
        fields = partial(_imported, base, source, labels)
        return _make(images, source, base, target, catalog, folder, fields, progress, commands)


def save_files(
    images: Images,
    files: Callable[[Path], None],
    parent: Parent,
    source: str,
    target: ImageRef,
    catalog: Path,
    progress: Callable[[str], None],
    commands: Sequence[str] = (),
) -> Imported:
    """Make an image of all files of a guest; what else it has is that of the guest's image.

    Args:
        images: the site's configuration.
        files: writes the files as a tar to a path.
        parent: the image of the guest.
        source: what the manifest says of where the files come from.
        target: name of the new image.
        catalog: where to put it; made if it does not exist.
        progress: gets a line for each step.
        commands: as for ``import_image``.

    Raises:
        UserError: the tar is refused, or the catalogue cannot be changed; and the errors of ``files``.
    """
    with _made_in(catalog, target) as folder:
        tar = folder / "files.tar"
        files(tar)
        fields = partial(_saved, parent, source)
        return _make(
            images,
            Source("tar", tar, arch=parent.manifest.arch),
            parent,
            target,
            catalog,
            folder,
            fields,
            progress,
            commands,
        )


def check_source(source: Source) -> None:
    """UserError if the file or folder of a source does not exist."""
    if source.kind != "docker" and not source.path.exists():
        raise UserError(f"cannot import {source}", f"{source.path} does not exist")


@contextlib.contextmanager
def _made_in(catalog: Path, target: ImageRef) -> Iterator[Path]:
    """A folder in the catalogue in which an image of this name is made."""
    check_new_name(target)
    prepare(catalog)
    with staging(catalog) as folder:
        yield folder


def _make(
    images: Images,
    source: Source,
    base: Parent,
    target: ImageRef,
    catalog: Path,
    folder: Path,
    fields: Callable[[dict[str, Any]], dict[str, Any]],
    progress: Callable[[str], None],
    commands: Sequence[str],
) -> Imported:
    """Let the worker read a source, and publish the result; ``folder`` is that of ``_made_in``.

    ``fields`` gives what the manifest has other than that of ``base``, from the worker's result.
    """
    hashed = _with_hash_tree(base, progress)
    out = folder / "out"
    out.mkdir()
    request = {
        "verity": hashed,
        "max_bytes": images.import_max_mib << 20,
        "max_files": images.import_max_files,
        "max_memory": MEMORY_MAX,
        "timeout_s": images.import_timeout_s,
        "cmdline": base.manifest.cmdline,
        "commands": list(commands),
    }
    found = run_worker(
        _local(source, folder, images, progress), out, request, images.import_timeout_s, progress, _boot(base)
    )
    progress("publishing")
    keys = tuple(MADE) if found.get("own") else ("root",)
    listed = chunks.ChunkList()
    made = _digests(out, keys, listed, progress)
    new = {blob.sha256: out / MADE[key][0] for key, blob in made.items()}
    for blob in (base.image.manifest.kernel, base.image.manifest.initrd):
        if blob.file not in made and copy_blob(base.catalog, catalog, blob, folder / blob.file):
            new[blob.sha256] = folder / blob.file
    parts: dict[str, Any] = {
        key: {"media_type": MADE[key][1] or _kernel_type(base), "sha256": one.sha256, "size": one.size}
        for key, one in made.items()
    }
    parts |= _place_list(listed.raw(), folder / "chunks", new)
    if hashed and _knows_verity(found.get("own")):
        parts["verity"] = found.get("verity")
    inherited = msgspec.to_builtins(base.manifest)
    for one in ("chunks", "verity"):
        inherited.pop(one, None)
    done = publish(catalog, target, inherited | fields(found) | parts, new)
    source_digest, special = found.get("digest"), found.get("special")
    return Imported(
        image=target.label,
        digest=done.digest,
        source_digest=source_digest if isinstance(source_digest, str) else "",
        changed=done.changed,
        special=special if isinstance(special, int) else 0,
        size=made["root"].size,
    )


def _kernel_type(base: Parent) -> str:
    """The media type of a kernel that a source brings itself."""
    return KERNEL_TYPE + named(base.manifest.arch).kernels[0]


def _digests(
    out: Path, keys: Sequence[str], listed: chunks.ChunkList, progress: Callable[[str], None]
) -> dict[str, Blob]:
    """The blobs that the worker has made, durable on the disk; ``listed`` gets the chunks of the root."""
    count = counter(progress, "published", sum(_size(out / MADE[key][0]) for key in keys))
    lists = {"root": listed}
    return {
        key: digest_of(out / MADE[key][0], sync=True, chunk_list=lists.get(key), count=count) for key in keys
    }


def _size(path: Path) -> int:
    """Of a file that the worker should have made; 0 if it has not, which ``digest_of`` refuses."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _place_list(raw: bytes, path: Path, new: dict[str, Path]) -> dict[str, Any]:
    """Write the root's chunk list to a file, to be published; returns the manifest's key, if it has one."""
    key = chunks.key(raw)
    if key is None:
        return {}
    path.write_bytes(raw)
    new[str(key["sha256"])] = path
    return {"chunks": key}


def _boot(base: Parent) -> dict[str, Path]:
    """Files of the image of the site that the worker may need: to read a disk, and for its agent."""
    return {blob.file: base.catalog.blob_path(blob) for blob in blobs(base.image.manifest)}


def _with_hash_tree(base: Parent, progress: Callable[[str], None]) -> bool:
    """Whether the root gets a hash tree: if that of ``base`` has one, the initrd of ``base`` can use it.

    Raises:
        UserError: it should, and veritysetup is missing.
    """
    if base.manifest.verity is msgspec.UNSET:
        progress(f"without a hash tree of the root: {base.image.ref} was built without one; build it again")
        return False
    if find_tool() is None:
        raise UserError("cannot make an image", f"{TOOL} is missing", f"install the package {PACKAGE}")
    return True


def _local(source: Source, folder: Path, images: Images, progress: Callable[[str], None]) -> Source:
    """The source as files: an image of a registry is fetched."""
    if source.kind != "docker":
        return source
    if not source.digest:
        offer = look(source, images.import_timeout_s)
        refuse_image(source, offer)
        source = offer.source
    fetched = folder / "fetched"
    fetched.mkdir()
    progress(f"fetching {source}")
    most, timeout_s = images.import_max_mib << 20, images.import_timeout_s
    fetch(source.pinned, fetched, most, timeout_s, progress, source.variant, named(source.arch))
    return replace(source, kind="fetched", path=fetched)


def parent_of(catalog: Catalog, image: ImageIdentity) -> Parent:
    """An image from which another is derived.

    Raises:
        UserError: its manifest is broken.
        FabricError: its catalogue cannot be read.
    """
    manifest = catalog.read_manifest(image.digest, str(image.ref))
    return Parent(image, manifest, catalog)


def kernel_of_site(images: Images, kernel: str, arch: str = "") -> Parent:
    """The image of the site that gives the kernel: the named one, or the site's choice.

    ``arch`` is the wanted architecture; empty: any, and of several this host's.

    Raises:
        UserError: there is no such image, or none is named or chosen.
        FabricError: the site's catalogue cannot be read.
    """
    name = kernel or images.import_kernel
    if not name:
        raise UserError(
            "cannot import an image",
            "the site has not chosen a kernel for imports (images.import_kernel)",
            "choose an image of the site whose kernel you want: --kernel NAME",
        )
    site = site_catalog(images)
    ref = ImageRef.parse(name)
    if ref.own:
        raise UserError(
            f"the image {ref} cannot give a kernel",
            "kernels are those of the site's images",
            "see: vhpc image ls",
        )
    try:
        return parent_of(site, site.resolve(ref, arch))
    except SeveralArchitecturesError:
        return parent_of(site, site.resolve(ref, platform.machine()))


def _imported(base: Parent, source: Source, own: Mapping[str, str], found: dict[str, Any]) -> dict[str, Any]:
    """Values of an import for its manifest; UserError if the worker's result does not fit into a manifest."""
    empty = msgspec.to_builtins(Process(entrypoint=(), arguments=(), environment={}, user="", working_dir=""))
    try:
        process = msgspec.convert(empty | (found.get("process") or {}), Process)
    except (msgspec.ValidationError, TypeError) as err:
        raise UserError(f"cannot import {source}", f"its configuration: {err}") from err
    given = found.get("labels")
    given = given if isinstance(given, dict) else {}
    labels = {key: text for key, text in given.items() if not key.startswith(OF_VHPC)} | dict(own)
    labels[KERNEL_LABEL] = str(base.image)
    labels |= covered_label(found)
    if source.digest:
        labels[REGISTRY_LABEL] = source.digest
    return _own_system(base, found.get("own")) | {
        "description": f"imported from {source.label}"[:1024],
        "labels": labels,
        "process": msgspec.to_builtins(process),
        "provenance": origin("vhpc image import", "", source.label, found, created(found)),
    }


def _knows_verity(own: object) -> bool:
    """Whether the kernel can use a hash tree; the site's kernel can, for the source's kernel ``own`` tells
    it."""
    return not isinstance(own, dict) or own.get("verity") is not False


def _own_system(base: Parent, own: object) -> dict[str, Any]:
    """The first process of the image: the agent alone, or the source's own system with its kernel."""
    if not isinstance(own, dict):
        initrd = base.catalog.blob_path(base.image.manifest.initrd)
        return {"init": "agent", "drivers": kept(base.manifest.drivers, initrd)}
    return {
        "init": own.get("init"),
        "drivers": own.get("drivers"),
        "min_memory_mib": max(base.manifest.min_memory_mib, OWN_INIT_MEMORY_MIB),
    }


def _saved(parent: Parent, source: str, found: dict[str, Any]) -> dict[str, Any]:
    """Values of the saved files of a guest for their manifest."""
    kept_labels = {key: text for key, text in parent.manifest.labels.items() if key != COMMANDS_LABEL}
    return {
        "labels": kept_labels | covered_label(found),
        "description": f"{source}, which ran {parent.image.ref.label}"[:1024],
        "provenance": origin("vhpc save", parent.image.digest, source, found, date(time.time())),
    }
