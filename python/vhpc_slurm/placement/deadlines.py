# SPDX-License-Identifier: Apache-2.0
"""How long a guest may take to start and to boot: from its memory and its GPUs.

A passed-through device may write to any page of the guest, so QEMU has to
have all of them, zeroed and pinned, before the guest's first instruction.
Published figures for that (docs/memory.md): 0.03 s/GiB with huge pages and 16
threads, 0.22 with one, 0.35 with ordinary pages.  A guest kernel before 6.14
sizes the BARs of a GPU of 80 GB and more in some 30 s.
"""

from __future__ import annotations

from vhpc_slurm.config import GPU_BOOT_S, Guests
from vhpc_slurm.model import GuestPlan

HUGE_S_PER_GIB = 0.25
ORDINARY_S_PER_GIB = 0.7


def memory_s_per_gib(*, huge: bool, perhaps_huge: bool, devices: bool) -> float:
    """Time to make a GiB of guest memory ready.

    Args:
        huge: it is certainly in huge pages.
        perhaps_huge: it may be.
        devices: something is passed through.
    """
    if devices and not huge:
        return ORDINARY_S_PER_GIB
    return HUGE_S_PER_GIB if huge or perhaps_huge else 0.0


def start_s(config: Guests, guest: GuestPlan) -> int:
    """Deadline of QEMU's start in seconds."""
    huge = guest.hugepage_kib > 0
    per_gib = memory_s_per_gib(huge=huge, perhaps_huge=huge, devices=bool(guest.devices))
    return config.stage_timeout_s + round(guest.memory_mib / 1024 * per_gib)


def boot_s(config: Guests, asked_s: int | None, guest: GuestPlan) -> int:
    """Deadline from the start to the agent's hello in seconds; what the user asked for comes first."""
    gpus = sum(device.traits.slow_boot for device in guest.devices)
    if asked_s:
        return min(asked_s, config.longest_boot_s(gpus))
    return config.boot_timeout_s + gpus * GPU_BOOT_S
