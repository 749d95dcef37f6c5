# SPDX-License-Identifier: Apache-2.0
"""Reservations of live guests on this node: in the journals, so that they survive every crash.

A plan takes the reservations of others into account and is recorded before the
next plan, both under one lock: so no CPU and no device is planned twice.
"""
# Decision: Reservations are in the journal

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from vhpc_slurm import files
from vhpc_slurm.errors import NodeError
from vhpc_slurm.hardware import Reservation
from vhpc_slurm.model import Generation, NodePlan
from vhpc_slurm.node.resource.protocol import Resource
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout


def of_plan(plan: NodePlan) -> tuple[Reservation, ...]:
    """The reservations of a plan's guests."""
    return tuple(
        Reservation(
            generation=str(plan.generation),
            guest=guest.index,
            cpus=tuple(sorted(pin.os_cpu for pin in guest.pins)),
            cells=tuple((cell.host_cell, cell.memory_mib) for cell in guest.cells),
            hugepage_kib=guest.hugepage_kib,
            devices=tuple(device.key for device in guest.devices),
        )
        for guest in plan.guests
    )


class Reservations(Resource):
    """What a plan gives to one guest."""

    kind = "claim"

    def take(self, journal: Journal, plan: NodePlan) -> None:
        """Record the reservations of a plan's guests; replaces an earlier plan of the same job.

        Raises:
            Stopped: the job has been ended meanwhile.
            NodeError: the journal cannot be written.
        """
        for entry in journal.held():
            if entry.kind == self.kind:
                journal.released(entry.key)
        for one in of_plan(plan):
            journal.announce(self.kind, f"{self.kind}:g{one.guest}", one)

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """CPUs, memory and devices were only planned: removing the entry from the journal frees them."""


def live(layout: Layout, excluding: Generation | None = None) -> tuple[Reservation, ...]:
    """Reservations of all generations that have a journal here, except one.

    Raises:
        NodeError: a journal is damaged, so its guests' reservations are unknown.
    """
    return tuple(
        _read(layout, generation, entry)
        for generation, entry in Reservations().entries(layout)
        if generation != excluding
    )


@contextlib.contextmanager
def plan_lock(layout: Layout, timeout_s: float) -> Iterator[None]:
    """Hold the lock that permits one plan at a time.

    Raises:
        NodeError: another Prolog kept the lock for ``timeout_s``.
    """
    path = layout.run / "plan.lock"
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    fd = files.open_lock(path)
    try:
        if not files.lock(fd, timeout_s):
            raise NodeError("another job's Prolog holds the planning lock for too long", str(path))
        yield
    finally:
        os.close(fd)


def _read(layout: Layout, generation: Generation, entry: Entry) -> Reservation:
    try:
        return entry.read(Reservation)
    except NodeError as err:
        path = layout.journals / f"{generation}.jsonl"
        raise NodeError(f"journal {path} is damaged", err.why, "check the resources in it manually") from err
