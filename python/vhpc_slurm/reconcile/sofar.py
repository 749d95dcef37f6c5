# SPDX-License-Identifier: Apache-2.0
"""The usage of a node's jobs until now, for people who look at a running job, and for metrics.

One message for all jobs of the node, in each health check. No job waits for it: guests have one deadline
together, and after a failure the figures are only missing.
"""

from __future__ import annotations

import logging
from operator import attrgetter

from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import Generation, GuestUsage, NodeUsage
from vhpc_slurm.model.usage import GpuUsage
from vhpc_slurm.node.guest import usage
from vhpc_slurm.node.guest.usage import AskedGuest
from vhpc_slurm.node.resource.domain import held_guests
from vhpc_slurm.node.store import joblock, journal, statefile
from vhpc_slurm.node.store.layout import Layout

log = logging.getLogger("vhpc")

Measured = dict[Generation, list[GuestUsage]]
STEPS_MAX = 256
"""Rows of all guests of a node: vhpcd keeps them in its memory."""


def measure(layout: Layout) -> Measured:
    """Ask the guests of this node, by generation; those that start or end now are not asked."""
    asked = [(generation, guest) for generation in _running(layout) for guest in _guests(layout, generation)]
    found: Measured = {}
    answers = usage.of_guests([guest for _, guest in asked], STEPS_MAX)
    for (generation, _), one in zip(asked, answers, strict=True):
        found.setdefault(generation, []).append(one)
    return found


def tell(client: ControllerClient, node: str, found: Measured) -> None:
    """Tell vhpcd what the guests have said; a node without guests says nothing."""
    if not found:
        return
    said = [NodeUsage(generation, node, tuple(guests)) for generation, guests in found.items()]
    try:
        client.report_usage_so_far(node, said)
    except VhpcError as err:
        log.info("vhpcd is not told what running jobs have used: %s", err.line())


def gpus(layout: Layout, found: Measured) -> dict[int, GpuUsage]:
    """The GPUs in these guests by Slurm's index; without those of a guest that does not name all of its.

    Both are in the guest's order: a device behind a later port has a higher address.
    """
    known: dict[int, GpuUsage] = {}
    for generation, guests in found.items():
        indexes = statefile.gpu_indexes(layout.state_file(generation.job_id))
        for guest in guests:
            own = indexes[guest.index] if guest.index < len(indexes) else []
            if len(own) == len(guest.gpus):
                known |= zip(own, sorted(guest.gpus, key=attrgetter("address")), strict=True)
    return known


def _running(layout: Layout) -> list[Generation]:
    """Generations with a journal, except those that a Prolog or Epilog works on."""
    return [
        generation
        for generation in journal.generations(layout.journals)
        if not joblock.busy(layout, generation.job_id) and not joblock.has_tombstone(layout, generation)
    ]


def _guests(layout: Layout, generation: Generation) -> list[AskedGuest]:
    try:
        return held_guests(layout, journal.read_entries(layout.journals, generation))
    except VhpcError as err:
        log.info("what %s has used is not known: %s", generation, err.line())
        return []
