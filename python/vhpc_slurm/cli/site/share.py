# SPDX-License-Identifier: Apache-2.0
"""`vhpc share`: snapshots of shared folders, which guests mount from a disk."""

from __future__ import annotations

import os
import time
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec
import typer

from vhpc_slurm.catalog import snapshots
from vhpc_slurm.cli import options, output
from vhpc_slurm.cli.options import Json
from vhpc_slurm.cli.progress import progress
from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.importing import snapshot as writing

KEEP_DAYS = 14.0


class Listed(msgspec.Struct, frozen=True):
    """A folder of shares.snapshots, with its current snapshot or the reason for having none."""

    path: str
    snapshot: snapshots.Snapshot | None
    problem: str = ""


def snapshot(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", show_default=False)],
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="PATH", help="Leave out a path in the folder; again for more."),
    ] = None,
    keep_days: Annotated[
        float,
        typer.Option("--keep-days", metavar="N", min=0.0, help="Remove snapshots replaced so long ago."),
    ] = KEEP_DAYS,
    as_json: Json = False,
) -> int:
    """Make a snapshot of a shared folder: guests that start from now on have this state of it.

    The folder is one of shares.snapshots in vhpc.toml. Run it again when its software has changed. A
    user is root in a guest, so a file that not all users can read is refused: leave it out with --exclude.
    Older snapshots stay for guests that use them: --keep-days is at least the longest time limit of jobs.
    """
    config, began = options.config(), time.time()
    excluded = _checked(config, folder, exclude or [])
    try:
        uid = writing.reader()
        new = snapshots.unfinished(config.images, folder, uid)
        try:
            progress(f"reading {folder}")
            counts = writing.write(Path(folder), new, excluded, uid, progress)
            progress("publishing the snapshot")
            made = snapshots.publish(folder, new, counts, began)
        finally:
            new.unlink(missing_ok=True)
        for name in snapshots.remove_old(config.images, folder, keep_days):
            progress(f"removed {name}")
    except OSError as err:
        top = snapshots.folder(config.images)
        raise FabricError(
            f"cannot write a snapshot into {top}", str(err), "may you write into the catalogue?"
        ) from err
    if as_json:
        output.write_json(made)
    else:
        content = f"{made.files} files, {output.size(made.bytes)} in {output.size(made.size)}"
        print(f"{folder}: {made.file}, {content}, {time.time() - began:.1f} s")
    return 0


def _checked(config: Config, folder: str, exclude: list[str]) -> list[str]:
    """The paths that are left out, relative to the folder.

    Raises:
        UserError: the folder has no snapshots, or a path is not in it.
    """
    if folder not in config.shares.snapshots:
        known = ", ".join(config.shares.snapshots) or "none"
        raise UserError(
            f"{folder} has no snapshots", f"shares.snapshots in vhpc.toml: {known}", "add the folder there"
        )
    found = []
    for path in exclude:
        inner = PurePosixPath(os.path.normpath(PurePosixPath(folder) / path))
        if inner == PurePosixPath(folder) or not inner.is_relative_to(folder):
            raise UserError(f"--exclude={path} is not in {folder}")
        if not os.path.lexists(inner):
            raise UserError(f"--exclude={path} does not exist in {folder}")
        found.append(str(inner.relative_to(folder)))
    return found


def ls(as_json: Json = False) -> int:
    """List the folders of shares.snapshots, and their current snapshots."""
    found = [_listed(options.config(), path) for path in options.config().shares.snapshots]
    if as_json:
        output.write_json(found)
        return 0
    if not found:
        print("no folder has snapshots: set shares.snapshots in vhpc.toml")
        return 0
    rows = []
    for one in found:
        made = one.snapshot
        if made is None:
            rows.append((one.path, "", "", "", one.problem))
        else:
            rows.append(
                (one.path, output.date(made.began), str(made.files), output.size(made.size), made.file)
            )
    output.write_table(("FOLDER", "READ", "FILES", "SIZE", "SNAPSHOT"), rows, right=("FILES", "SIZE"))
    return 0


def _listed(config: Config, path: str) -> Listed:
    try:
        made = snapshots.current(config.images, path)
    except FabricError as err:
        return Listed(path, None, err.line())
    return Listed(path, made, "" if made else f"none: vhpc share snapshot {path}")
