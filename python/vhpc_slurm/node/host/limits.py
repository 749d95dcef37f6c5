# SPDX-License-Identifier: Apache-2.0
"""What the processes of a generation may use, from what is planned for its guests."""

from __future__ import annotations

from dataclasses import dataclass

from vhpc_slurm.config import Guests
from vhpc_slurm.model import NodePlan

TASKS_OF_QEMU = 512
"""Threads beside vCPUs: 64 for I/O (QEMU's default), 16 that clear memory, vhost."""
TASKS_OF_HELPERS = 256


@dataclass(frozen=True)
class Limits:
    """What a generation may use on this node.

    ``memory_mib`` bounds QEMU and helpers together, ``helper_memory_mib`` the
    helpers alone; ``tasks`` counts threads; ``cpus`` are OS CPU numbers.
    """

    memory_mib: int
    helper_memory_mib: int
    tasks: int
    helper_tasks: int
    cpus: tuple[int, ...]


def limits_of(plan: NodePlan, config: Guests) -> Limits:
    """Bounds of a generation, from what is planned for its guests.

    Wide ones: they are there for what gets out of hand.  Memory that guests
    have in huge pages is not counted by the kernel's memory controller.
    """
    count = len(plan.guests)
    helpers = count * config.helper_memory_mib
    vcpus = sum(len(guest.pins) for guest in plan.guests)
    cpus = {pin.os_cpu for guest in plan.guests for pin in guest.pins}
    return Limits(
        memory_mib=sum(guest.memory_mib for guest in plan.guests)
        + helpers
        + count * config.qemu_memory_slack_mib,
        helper_memory_mib=helpers,
        tasks=count * (TASKS_OF_QEMU + TASKS_OF_HELPERS) + vcpus,
        helper_tasks=count * TASKS_OF_HELPERS,
        cpus=tuple(sorted(cpus.union(*(guest.emulator_cpus for guest in plan.guests)))),
    )
