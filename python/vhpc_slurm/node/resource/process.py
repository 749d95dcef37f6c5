# SPDX-License-Identifier: Apache-2.0
"""A helper process of a generation: a daemon of shared folders, passt, a shim, or a server of its image.

Each has the generation as a mark in its environment.
"""
# Decision: A process is a pid, a start time and a marker

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from vhpc_slurm.model import Generation
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.process import ProcessRef
from vhpc_slurm.node.resource import uid
from vhpc_slurm.node.resource.protocol import Resource, is_known, orphan_of, unless
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record

GRACE_S = 0.5
"""How long a process may take after SIGTERM, in seconds."""
LONGER_S = {"follower": 2.0}
"""The same by role: a follower reports to vhpcd before it ends."""


class ProcessData(Record, frozen=True, omit_defaults=True):
    """The entry of a helper process.

    Attributes:
        role: its program; several of a guest may have the same.
        pid, started: None until they are noted: a Prolog may be killed before.
        path: the shared folder that it serves.
    """

    role: str
    pid: int | None = None
    started: int | None = None
    path: str = ""

    @property
    def ref(self) -> ProcessRef | None:
        """The process; None if it was not noted."""
        return None if self.pid is None or self.started is None else ProcessRef(self.pid, self.started)


class Process(Resource):
    """A helper process: announced, started by the caller, and noted."""

    kind = "process"

    def announce(self, journal: Journal, name: str, role: str, path: str = "") -> str:
        """Announce a process that is started next; returns its key."""
        key = f"{self.kind}:{name}"
        journal.announce(self.kind, key, ProcessData(role, path=path))
        return key

    def note(self, journal: Journal, key: str, ref: ProcessRef) -> None:
        """Note the process that was started."""
        journal.update(key, pid=ref.pid, started=ref.started)

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """End a process; one whose pid was never noted is found by its mark."""
        del layout
        data = entry.read(ProcessData)
        if noted := data.ref:
            process.end(noted, grace_s=LONGER_S.get(data.role, GRACE_S))
            return
        for ref, _ in process.marked(str(generation)):
            process.end(ref)

    def orphans(self, layout: Layout) -> Iterator[NodeFinding]:
        """Processes with the mark of a generation without a journal, or with a uid that is not allocated."""
        found = {ref: name for ref, name in process.marked() if not is_known(layout, name)}
        for ref, name in found.items():
            what = f"process {ref.pid} is of generation {name[:40]!r}, which has no journal"
            yield from orphan_of(layout, name, Kind.ORPHAN_PROCESS, what, partial(process.end, ref))
        in_use = {one for one in process.uids_in_use() if uid.in_range(layout.config, one)}
        for number in in_use - {one for one, _ in uid.allocated(layout)}:
            for ref in set(process.of_uid(number)) - found.keys():
                repair = unless(partial(_is_allocated, layout, number), partial(process.end, ref))
                what = f"process {ref.pid} has uid {number}, which is allocated to no generation"
                yield NodeFinding(Kind.ORPHAN_PROCESS, what, repair)


def _is_allocated(layout: Layout, number: int) -> bool:
    return number in {other for other, _ in uid.allocated(layout)}
