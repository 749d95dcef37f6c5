# SPDX-License-Identifier: Apache-2.0
"""Limits of a generation's processes, from the plan of its guests."""

from __future__ import annotations

from vhpc_slurm.config import Guests
from vhpc_slurm.model import NodePlan
from vhpc_slurm.record import Record

TASKS_OF_QEMU = 512
"""Threads in addition to vCPUs: 64 for I/O (QEMU's default), 16 that clear memory, vhost."""
TASKS_OF_HELPERS = 256


class Limits(Record, frozen=True):
    """Limits of a generation on this node.

    ``memory_mib`` limits QEMU and helpers together, ``helper_memory_mib`` the
    helpers alone; ``tasks`` counts threads; ``cpus`` are OS CPU numbers.
    """

    memory_mib: int
    helper_memory_mib: int
    tasks: int
    helper_tasks: int
    cpus: tuple[int, ...]


def limits_of(plan: NodePlan, config: Guests) -> Limits:
    """Limits of a generation, from the plan of its guests.

    They are wide: they only stop runaway processes.  The kernel's memory
    controller does not count guest memory in huge pages.
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
