# SPDX-License-Identifier: Apache-2.0
"""vhpc image diff."""

from __future__ import annotations

import json
from typing import Any

from vhpc_slurm.cli import options, output
from vhpc_slurm.cli.options import CatalogFolder, ImageArgument, Json
from vhpc_slurm.cli.progress import progress
from vhpc_slurm.importing.compare import Change, Differences, Entry, Side, compare
from vhpc_slurm.model import ImageRef
from vhpc_slurm.terminal import one_line

SIGNS = {"added": "+", "removed": "-", "changed": "~"}


def diff(
    before: ImageArgument,
    after: ImageArgument,
    catalog: CatalogFolder = None,
    as_json: Json = False,
) -> int:
    """Show what differs between two images: their manifests, and the files of their roots.

    The exit status is 1 if something differs.
    """
    config = options.config()
    places = [(options.catalog(config, catalog, name), name) for name in (before, after)]
    sides = [Side(where.resolve(ImageRef.parse(name)), where) for where, name in places]
    found = compare(config.images, sides[0], sides[1], progress)
    if as_json:
        output.write_json(
            {
                "before": _image(sides[0], before),
                "after": _image(sides[1], after),
                "manifest": found.manifest,
                "files": [_json(change) for change in found.files],
            }
        )
    else:
        _print(found)
    return int(bool(found.manifest or found.files))


def _image(side: Side, name: str) -> dict[str, str]:
    return {"image": ImageRef.parse(name).label, "digest": side.image.digest}


def _print(found: Differences) -> None:
    for field in found.manifest:
        print(f"manifest {field.key}: {_text(field.before)} -> {_text(field.after)}")
    for change in found.files:
        print(f"{SIGNS[change.kind]} {_path(change.path)}  {_about(change)}")
    if not found.manifest and not found.files:
        print("no difference")


def _text(value: Any) -> str:
    return "-" if value is None else one_line(json.dumps(value, ensure_ascii=False))


def _about(change: Change) -> str:
    """Describes a file that is new or gone, or its differences."""
    if change.before is None or change.after is None:
        entry = change.before or change.after
        assert entry is not None
        size = f", {output.size(entry.size)}" if entry.type == "file" else ""
        return f"{entry.type}, mode {entry.mode:04o}, owner {entry.uid}:{entry.gid}{size}"
    return ", ".join(filter(None, (_part(name, change.before, change.after) for name in change.what)))


def _part(name: str, before: Entry, after: Entry) -> str:
    """How one field of a file differs; empty if another field says it."""
    same_type = before.type == after.type
    texts = {
        "type": f"{before.type} -> {after.type}",
        "mode": f"mode {before.mode:04o} -> {after.mode:04o}",
        "uid": f"owner {before.uid}:{before.gid} -> {after.uid}:{after.gid}",
        "size": f"size {before.size} -> {after.size}",
        "content": "content",
    }
    if name == "gid" and before.uid == after.uid:
        name = "uid"
    if name == "content" and before.type != "file":
        return f"{_path(before.content)} -> {_path(after.content)}" if same_type else ""
    if name == "xattrs":
        return f"attributes {' '.join(sorted(dict(before.xattrs.items() ^ after.xattrs.items())))}"
    return texts.get(name, "")


def _path(path: str) -> str:
    """A path as one line: also one that is not UTF-8, or has line feeds."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in path)


def _json(change: Change) -> dict[str, Any]:
    return {
        "path": _unicode(change.path),
        "change": change.kind,
        "differs": change.what,
        "before": _entry(change.before),
        "after": _entry(change.after),
    }


def _entry(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {
        "type": entry.type,
        "mode": f"{entry.mode:04o}",
        "uid": entry.uid,
        "gid": entry.gid,
        "size": entry.size,
        "content": _unicode(entry.content),
        "xattrs": entry.xattrs,
    }


def _unicode(text: str) -> str:
    """A text in which bytes that are no UTF-8 are written out."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
