# SPDX-License-Identifier: Apache-2.0
"""The usage of a node's jobs until now, for people who look at a running job.

One message for all jobs of the node, in each health check. No job waits for it: guests have one deadline
together, and after a failure the figures are only missing.
"""

from __future__ import annotations

import logging

from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import Generation, GuestUsage, NodeUsage
from vhpc_slurm.node.guest import usage
from vhpc_slurm.node.guest.usage import AskedGuest
from vhpc_slurm.node.resource.domain import held_guests
from vhpc_slurm.node.store import joblock, journal
from vhpc_slurm.node.store.layout import Layout

log = logging.getLogger("vhpc")

STEPS_MAX = 256
"""Rows of all guests of a node: vhpcd keeps them in its memory."""


def report(layout: Layout, client: ControllerClient, node: str) -> None:
    """Ask the guests of this node, and tell vhpcd what they say; a node without guests says nothing."""
    asked = [(generation, guest) for generation in _running(layout) for guest in _guests(layout, generation)]
    found = usage.of_guests([guest for _, guest in asked], STEPS_MAX)
    by_generation: dict[Generation, list[GuestUsage]] = {}
    for (generation, _), one in zip(asked, found, strict=True):
        by_generation.setdefault(generation, []).append(one)
    if not by_generation:
        return
    said = [NodeUsage(generation, node, tuple(guests)) for generation, guests in by_generation.items()]
    try:
        client.report_usage_so_far(node, said)
    except VhpcError as err:
        log.info("vhpcd is not told what running jobs have used: %s", err.line())


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
