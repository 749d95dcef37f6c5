# SPDX-License-Identifier: Apache-2.0
"""What live guests hold of this node: in the journals, so that it survives every crash.

A plan is made from what others hold and is announced before the next one may
be made, both under one lock: so no CPU and no device is planned for twice.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from vhpc_slurm import files
from vhpc_slurm.errors import NodeError
from vhpc_slurm.hardware import Reservation
from vhpc_slurm.model import Generation, NodePlan
from vhpc_slurm.node.store import journal, kinds
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout


def of_plan(plan: NodePlan) -> tuple[Reservation, ...]:
    """What the guests of a plan will hold."""
    return tuple(
        Reservation(
            generation=str(plan.generation),
            guest=guest.index,
            cpus=tuple(sorted(pin.os_cpu for pin in guest.pins)),
            cells=tuple((cell.host_cell, cell.memory_mib) for cell in guest.cells),
            hugepage_kib=guest.hugepage_kib,
            devices=tuple(device.address for device in guest.devices),
        )
        for guest in plan.guests
    )


def live(layout: Layout, excluding: Generation | None = None) -> tuple[Reservation, ...]:
    """Reservations of all generations that have a journal here, but for one.

    Raises:
        NodeError: a journal is damaged: what its guests hold is not known.
    """
    found = []
    for generation in journal.generations(layout.journals):
        if generation == excluding:
            continue
        for entry in journal.read_entries(layout.journals, generation):
            if entry.kind == kinds.RESERVATION:
                found.append(_parse(layout, generation, entry.data))
    return tuple(found)


def reserve(journal: Journal, plan: NodePlan) -> None:
    """Write down what the guests of a plan will hold, in place of an earlier plan of the same job.

    Raises:
        Stopped: the job has been ended meanwhile.
        NodeError: the journal cannot be written.
    """
    for entry in journal.held():
        if entry.kind == kinds.RESERVATION:
            journal.released(entry.key)
    for reservation in of_plan(plan):
        journal.acquire(kinds.RESERVATION, f"claim:g{reservation.guest}", **msgspec.to_builtins(reservation))


@contextlib.contextmanager
def plan_lock(layout: Layout, timeout_s: float) -> Iterator[None]:
    """One plan at a time.

    Raises:
        NodeError: another Prolog kept the lock for ``timeout_s``.
    """
    path = layout.run / "plan.lock"
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    fd = files.open_lock(path)
    try:
        if not files.lock(fd, timeout_s):
            raise NodeError("another job's Prolog has held the planning lock for too long", str(path))
        yield
    finally:
        os.close(fd)


def _parse(layout: Layout, generation: Generation, data: dict[str, Any]) -> Reservation:
    try:
        return msgspec.convert(data, Reservation)
    except msgspec.ValidationError as err:
        path = layout.journals / f"{generation}.jsonl"
        raise NodeError(f"journal {path} is damaged", str(err), "check what it names by hand") from err
