# SPDX-License-Identifier: Apache-2.0
"""The run folder of a job: its state file, and a folder with sockets and logs for each guest."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from vhpc_slurm.model import Generation
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.resource.protocol import Resource, unless
from vhpc_slurm.node.store import journal
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record


class FolderData(Record, frozen=True):
    """The entry of a run folder."""

    path: str


class RunFolder(Resource):
    """The run folder of a job."""

    kind = "rundir"

    def take(self, layout: Layout, journal: Journal) -> None:
        """Make the folder; OSError if it is there already, or cannot be made."""
        path = layout.job(journal.generation.job_id)
        journal.announce(self.kind, f"{self.kind}:{path}", FolderData(str(path)))
        path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        path.mkdir(mode=0o711)

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """Remove the folder with all in it."""
        del layout, generation
        path = Path(entry.read(FolderData).path)
        # rmtree works on descriptors here (shutil.rmtree.avoids_symlink_attacks);
        # the folder is root's own anyway.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def orphans(self, layout: Layout) -> Iterator[NodeFinding]:
        """Folders of jobs without a journal."""
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(layout.jobs.iterdir()):
                owned = partial(_is_of_known_job, layout, path.name)
                if not owned():
                    repair = unless(owned, partial(_remove, path))
                    yield NodeFinding(Kind.ORPHAN_FOLDER, f"{path} belongs to no journal", repair)


def _is_of_known_job(layout: Layout, name: str) -> bool:
    known = {generation.job_id for generation in journal.generations(layout.journals)}
    return name.isdecimal() and int(name) in known


def _remove(path: Path) -> None:
    """Remove a folder with all in it, or a file or link that somebody has put in a folder's place."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)
