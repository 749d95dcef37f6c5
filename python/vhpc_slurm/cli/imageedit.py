# SPDX-License-Identifier: Apache-2.0
"""vhpc image tag, rm, verify, gc: changes to a catalogue, and checks of all its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vhpc_slurm.catalog import blobs, edit, refs, resolve, verify_blob
from vhpc_slurm.cli import output
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageIdentity, ImageRef


def tag(catalog: Path, source: str, target: str, *, as_json: bool) -> int:
    """Let another name point to an image; errors as ``edit.tag``."""
    image = edit.tag(catalog, ImageRef.parse(source), ImageRef.parse(target))
    if as_json:
        output.write_json({"image": str(image.ref), "digest": image.digest})
    else:
        print(f"{image.ref} {image.digest}")
    return 0


def rm(catalog: Path, names: Sequence[str], *, as_json: bool) -> int:
    """Remove names; errors as ``edit.remove``. All names are checked before the first is removed."""
    wanted = [ImageRef.parse(name) for name in names]
    known = {(ref.name, ref.tag) for ref in refs(catalog)}
    for ref in wanted:
        if not ref.digest and (ref.name, ref.tag) not in known:
            raise UserError(f"the catalogue has no image {ref}", "", "see: vhpc image ls")
    done = [{"image": str(ref), "digest": edit.remove(catalog, ref) or None} for ref in wanted]
    if as_json:
        output.write_json(done)
        return 0
    for row in done:
        print(f"removed {row['image']} ({row['digest'] or 'it had no digest'})")
    return 0


def verify(catalog: Path, names: Sequence[str], *, as_json: bool) -> int:
    """Check manifest and blobs of images, by default of all; exit status 1 if one is broken."""
    wanted = [ImageRef.parse(name) for name in names] or list(refs(catalog))
    sound: set[tuple[str, int]] = set()
    results: list[dict[str, Any]] = []
    for ref in wanted:
        try:
            image = resolve(catalog, ref)
            _verify(catalog, image, sound)
            results.append({"image": str(ref), "digest": image.digest, "problem": None})
        except UserError as err:
            results.append({"image": str(ref), "digest": None, "problem": err.line()})
    if as_json:
        output.write_json(results)
    else:
        rows = [(row["image"], row["digest"] or "-", row["problem"] or "ok") for row in results]
        output.write_table(("IMAGE", "DIGEST", "RESULT"), rows)
    return int(any(row["problem"] for row in results))


def _verify(catalog: Path, image: ImageIdentity, sound: set[tuple[str, int]]) -> None:
    """UserError unless all blobs are as the manifest says; ``sound`` has those that were read before."""
    for blob in blobs(image.manifest):
        if (blob.sha256, blob.size) not in sound:
            verify_blob(catalog, blob, str(image.ref))
            sound.add((blob.sha256, blob.size))


def gc(catalog: Path, days: float, *, dry_run: bool, as_json: bool) -> int:
    """Delete images without a name; exit status 1 if a manifest is broken. Errors as ``edit.collect``."""
    found = edit.collect(catalog, days * 86400.0, dry_run=dry_run)
    freed = sum(item.size for item in found.removed)
    if as_json:
        output.write_json(
            {
                "removed": found.removed,
                "freed": freed,
                "waiting": [{"digest": digest, "seconds": round(left)} for digest, left in found.waiting],
                "broken": found.broken,
                "dry_run": dry_run,
            }
        )
        return int(bool(found.broken))
    verb = "would be deleted" if dry_run else "deleted"
    for item in found.removed:
        print(f"{verb}: {item.kind} {item.name} ({output.size(item.size)})")
    for digest, left in found.waiting:
        print(f"kept for {output.span(left)}: {digest}, which has no name")
    for line in found.broken:
        print(f"no blob is deleted, because one may need it: {line}")
    print(f"{output.size(freed)} {'would be freed' if dry_run else 'freed'}")
    return int(bool(found.broken))
