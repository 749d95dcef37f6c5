# SPDX-License-Identifier: Apache-2.0
"""Differences between two images: between their manifests, and between the files of their roots."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vhpc_slurm.catalog import FolderCatalog
from vhpc_slurm.catalog.changes import check_owner
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing import memory
from vhpc_slurm.importing.listing import ROOT
from vhpc_slurm.importing.sandbox import run_worker
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import ImageIdentity
from vhpc_slurm.progress import counter
from vhpc_slurm.undecodable import UNDECODABLE

MEMORY_MAX = 16 << 30
"""Bytes of address space of the process that reads a root."""
LINE_MAX = 1 << 20


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file of a root, as ``listing`` writes it.

    ``content`` is the sha256 of a file, the target of a link, the number of a device; ``size`` is 0
    unless it is a file. ``xattrs``: name -> sha256 of the value.
    """

    path: str
    type: str
    mode: int
    uid: int
    gid: int
    size: int
    content: str
    xattrs: dict[str, str]


@dataclass(frozen=True)
class Field:
    """A key of the manifest that differs; None: the manifest does not have it."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Change:
    """A file that differs; None: the root does not have it."""

    path: str
    before: Entry | None
    after: Entry | None

    @property
    def kind(self) -> str:
        """``added``, ``removed`` or ``changed``."""
        if self.before is None:
            return "added"
        return "removed" if self.after is None else "changed"

    @property
    def what(self) -> tuple[str, ...]:
        """The fields of ``Entry`` that differ, of a changed file."""
        if self.before is None or self.after is None:
            return ()
        fields = Entry.__struct_fields__
        return tuple(name for name in fields if getattr(self.before, name) != getattr(self.after, name))


@dataclass(frozen=True)
class Differences:
    """All that differs, sorted by key and by path."""

    manifest: tuple[Field, ...]
    files: tuple[Change, ...]


@dataclass(frozen=True)
class Side:
    """One of two images, and the catalogue that has it."""

    image: ImageIdentity
    catalog: FolderCatalog


def compare(images: Images, before: Side, after: Side, progress: Callable[[str], None]) -> Differences:
    """Compare two images.

    Roots are read in the sandbox of imports, within the limits of an import. The files of a root
    are unpacked in memory, or, if there is not enough, in the folder for temporary files (TMPDIR).

    Args:
        images: the site's configuration.
        before: the first image.
        after: the second image.
        progress: gets a line for each step.

    Raises:
        UserError: an image is broken, or its root is refused.
        FabricError: a catalogue cannot be read.
    """
    fields = tuple(_fields(_flat(before), _flat(after)))
    if before.image.manifest.root.sha256 == after.image.manifest.root.sha256:
        return Differences(fields, ())
    with _listed(images, before, progress) as first, _listed(images, after, progress) as second:
        old = {entry.path: entry for entry in _entries(first, before, images.import_max_files)}
        changes = []
        for entry in _entries(second, after, images.import_max_files):
            known = old.pop(entry.path, None)
            if known != entry:
                changes.append(Change(entry.path, known, entry))
    changes += [Change(path, entry, None) for path, entry in old.items()]
    return Differences(fields, tuple(sorted(changes, key=lambda change: change.path)))


def _fields(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Field]:
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield Field(key, before.get(key), after.get(key))


def _flat(side: Side) -> dict[str, Any]:
    """A manifest as keys with dots; lists are values."""
    whole = side.catalog.read_manifest(side.image.digest, str(side.image.ref))
    found: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else key, inner)
        else:
            found[prefix] = value

    add("", msgspec.to_builtins(whole))
    return found


@contextmanager
def _listed(images: Images, side: Side, progress: Callable[[str], None]) -> Iterator[Path]:
    """A file with the listing of an image's root."""
    name, root = side.image.ref.label, side.image.manifest.root
    check_owner(side.catalog.path, "compare images of")
    progress(f"reading {name}")
    side.catalog.verify_blob(root, str(side.image.ref), counter(progress, "checked", root.size))
    with tempfile.TemporaryDirectory(prefix="vhpc-") as folder:
        out = Path(folder)
        request = {
            "max_bytes": images.import_max_mib << 20,
            "max_files": images.import_max_files,
            "max_memory": MEMORY_MAX,
            "timeout_s": images.import_timeout_s,
            "memory": memory.room(),
        }
        source = Source(ROOT, side.catalog.blob_path(root).resolve())
        try:
            run_worker(source, out, request, images.import_timeout_s, progress)
        except UserError as err:
            raise UserError(f"cannot read the root of {name}", err.why, err.hint) from err
        yield out / "files"


def _entries(path: Path, side: Side, max_files: int) -> Iterator[Entry]:
    """The lines of a listing, checked."""
    try:
        with path.open("rb") as file:
            for _ in range(max_files):
                if not (line := file.readline(LINE_MAX)):
                    return
                yield msgspec.convert(json.loads(line), Entry)
    except (OSError, *UNDECODABLE) as err:
        raise UserError(f"cannot read the root of {side.image.ref.label}", f"its listing: {err}") from err
