# SPDX-License-Identifier: Apache-2.0
"""The control group of a generation, which has its guests and their helpers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from vhpc_slurm.model import Generation
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.host import cgroup
from vhpc_slurm.node.host.cgroup import Cgroup
from vhpc_slurm.node.host.limits import Limits
from vhpc_slurm.node.resource.protocol import Resource, orphan_of
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout


class ControlGroup(Resource):
    """The control group of a generation."""

    kind = "cgroup"

    def take(self, journal: Journal, limits: Limits) -> Cgroup:
        """Make the control group, before the first process in it exists; NodeError if that fails."""
        generation = str(journal.generation)
        journal.acquire(self.kind, f"{self.kind}:{generation}")
        group = Cgroup.of(generation)
        group.create(limits)
        return group

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """End all processes in the control group, and remove the group."""
        del layout, entry
        _end(str(generation))

    def orphans(self, layout: Layout) -> Iterator[NodeFinding]:
        """Control groups of generations without a journal."""
        for name in sorted(cgroup.generations()):
            what = f"control group of generation {name[:40]!r}, which has no journal"
            yield from orphan_of(layout, name, Kind.ORPHAN_CGROUP, what, partial(_end, name))


def _end(generation: str) -> None:
    group = Cgroup.of(generation)
    group.kill()
    group.remove()
