# SPDX-License-Identifier: Apache-2.0
"""The disk of a guest on the node's storage."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from vhpc_slurm.model import Generation
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.resource.protocol import Resource, orphan_of
from vhpc_slurm.node.store import disks
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record


class DiskData(Record, frozen=True):
    """The entry of a disk: the guest's number on its node."""

    index: int


class Disk(Resource):
    """A guest's disk."""

    kind = "disk"

    def take(
        self, layout: Layout, journal: Journal, index: int, size_mib: int, node: str, *, blank: bool = False
    ) -> None:
        """Make the disk of the node's guest number ``index``; raises as ``disks.make``."""
        generation = journal.generation
        name = disks.path(layout, generation, index).name
        journal.announce(self.kind, f"{self.kind}:{name}", DiskData(index))
        disks.make(layout, generation, index, size_mib, node, blank=blank)

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """Delete the disk; QEMU has ended."""
        disks.delete(layout, generation, entry.read(DiskData).index)

    def orphans(self, layout: Layout) -> Iterator[NodeFinding]:
        """Disks of generations without a journal."""
        for generation, index in list(disks.existing(layout)):
            what = f"disk {disks.path(layout, generation, index)} belongs to no journal"
            repair = partial(disks.delete, layout, generation, index)
            yield from orphan_of(layout, str(generation), Kind.ORPHAN_DISK, what, repair)
