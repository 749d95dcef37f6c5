# SPDX-License-Identifier: Apache-2.0
"""The disk of a guest on the node's storage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from vhpc_slurm.config import Config
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.checked import CheckResult, error, ok, warn
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

    def check(self, config: Config, node: str, *, root: bool) -> Iterator[CheckResult]:
        """Results where the site gives guests disks; the folder is tried by root only."""
        del node
        most = config.disks.max_mib
        if most == 0:
            return
        absent = [program for program in (disks.FALLOCATE, disks.MKFS) if not os.access(program, os.X_OK)]
        if absent:
            what = f"{' and '.join(absent)} not found: jobs with --vhpc-disk fail here, and drain this node"
            yield error("disks.programs", what, "apt install util-linux e2fsprogs")
        if not root:
            yield warn("disks.folder", "disks.folder was not tried", "run vhpc doctor as root")
            return
        try:
            space_mib = disks.free_mib(Layout(config))
        except VhpcError as err:
            what = f"{err.line()}: jobs with --vhpc-disk fail here, and drain this node"
            yield error("disks.folder", what, err.hint)
            return
        text = f"{config.disks.folder} has {space_mib} MiB for disks; a guest may ask for {most} MiB"
        if space_mib < most:
            yield warn("disks.folder", text, "use a larger file system, or lower disks.max_mib")
        else:
            yield ok("disks.folder", text)
