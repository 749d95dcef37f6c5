# SPDX-License-Identifier: Apache-2.0
"""Snapshots among a guest's shared folders: disks that all guests read, instead of daemons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from vhpc_slurm.catalog import snapshots
from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import ImageIdentity, Share

FORMAT = "erofs"
"""The kernel of an image with such a root can mount a snapshot."""


def current(
    config: Config, shares: Iterable[Share], image: ImageIdentity
) -> tuple[tuple[Share, ...], tuple[str, ...]]:
    """The folders of a new guest, with the current snapshots, and why some have none.

    A folder without one is no failure: its files can be read through virtiofsd as well.
    """
    found, problems = [], []
    for share in shares:
        chosen = share
        if share.path in config.shares.snapshots and image.manifest.root_format == FORMAT:
            try:
                snapshot = snapshots.current(config.images, share.path)
            except FabricError as err:
                problems.append(err.line())
            else:
                if snapshot is None:
                    problems.append(f"{share.path} has no snapshot")
                else:
                    chosen = of(share, str(snapshots.folder(config.images) / snapshot.file))
        found.append(chosen)
    return tuple(found), tuple(problems)


def saved(config: Config, shares: Iterable[Share], files: Mapping[str, str]) -> tuple[Share, ...]:
    """The folders of a guest that continues a checkpoint: its disks are those that it was saved with.

    Args:
        config: has the folder of snapshots.
        shares: the folders.
        files: the saved guest's snapshots: folder -> file.

    Raises:
        UserError: a snapshot does not exist any more, or the folder is not shared any more.
    """
    found = tuple(of(share, files[share.path]) if share.path in files else share for share in shares)
    left = {path: file for path, file in files.items() if path not in {share.path for share in found}}
    top = snapshots.folder(config.images)
    for share in found:
        if share.snapshot and not snapshots.is_one(top, share.snapshot):
            left[share.path] = share.snapshot
    for path, file in left.items():
        raise UserError(
            "the checkpoint cannot be resumed",
            f"its guest has mounted the snapshot {file} of {path}, which is not there any more",
            "resume a later checkpoint, or submit the job again without --vhpc-resume",
        )
    return found


def of(share: Share, file: str) -> Share:
    """A share that is a snapshot: no one writes there, so the guest itself keeps data and locks."""
    return replace(share, snapshot=file, read_only=True, locks="guest", cache="always")


def kept(shares: Iterable[Share]) -> tuple[tuple[str, str], ...]:
    """Folders and files of a guest's snapshots, for its checkpoint."""
    return tuple((share.path, share.snapshot) for share in shares if share.snapshot)
