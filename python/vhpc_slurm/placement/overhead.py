# SPDX-License-Identifier: Apache-2.0
"""Memory that guests cost outside of themselves; docs/memory.md has the formula and its sources."""

from __future__ import annotations

from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.hardware import PciFunction
from vhpc_slurm.model import JobRequest, NodeAllocation
from vhpc_slurm.placement.devices import Wanted
from vhpc_slurm.placement.memory import MemorySize, size_memory

QEMU_MIB = 128
VCPU_MIB = 2
SHARE_MIB = 8
TABLE_SHARE = 512
"""An entry of eight bytes maps a page of 4 KiB."""


def outside_mib(guests_mib: int, vcpus: int, wanted: Wanted, request: JobRequest, config: Config) -> int:
    """What the guests of a job on a node need beside their own memory, in MiB, at most.

    Args:
        guests_mib: memory of all guests.
        vcpus: of all guests.
        wanted: their devices.
        request: how many guests.
        config: pages and shared folders.
    """
    largest_vfs = sorted(map(_bars, wanted.pool), reverse=True)[: wanted.vfs]
    bars = sum(map(_bars, wanted.gpus)) + sum(largest_vfs)
    devices = bool(wanted.gpus or wanted.vfs)
    return _sum_mib(guests_mib, vcpus, request, config, devices=devices, bars=bars)


def _sum_mib(
    guests_mib: int, vcpus: int, request: JobRequest, config: Config, *, devices: bool, bars: int
) -> int:
    """The formula: QEMU and the shares' daemons, threads, page tables.

    Tables are QEMU's, KVM's, those of each share's daemon, and with devices the
    IOMMU's.  BARs are mapped by QEMU and KVM, in ordinary pages whatever the
    guest's memory is in.
    """
    shares = config.shares.home + config.shares.work_dir + len(config.shares.site)
    fixed = request.guests_per_node * (QEMU_MIB + SHARE_MIB * shares) + VCPU_MIB * vcpus
    huge = config.placement.hugepages in ("2M", "1G")
    tables = 0 if huge else guests_mib * (2 + shares + devices) // TABLE_SHARE
    return fixed + tables + 2 * (bars >> 20) // TABLE_SHARE


def _bars(function: PciFunction) -> int:
    return sum(bar.size for bar in function.bars if bar.memory)


def at_least(
    allocation: NodeAllocation, request: JobRequest, config: Config
) -> tuple[MemorySize | None, list[VhpcError]]:
    """As much of a node's reckoning as can be done without seeing the node: all but its BARs.

    Returns:
        The most that guests can have there and the least that stays outside, and
        no errors, or None and the node's own errors.
    """
    size, errors = size_memory(allocation, request, config.guests.memory_reserve_mib)
    if size is None:
        return None, errors
    counted = {gres.name for gres in allocation.gres if gres.count}
    vfs = config.placement.vf_gres in counted if request.vfs is None else request.vfs > 0
    devices = vfs or config.placement.gpu_gres in counted
    needed = _sum_mib(size.guests_mib, len(allocation.cpu_ids), request, config, devices=devices, bars=0)
    size, _, errors = cover(size, needed, allocation, request, devices=devices)
    return size, errors


def cover(
    size: MemorySize,
    needed_mib: int,
    allocation: NodeAllocation,
    request: JobRequest,
    *,
    devices: bool,
) -> tuple[MemorySize | None, list[str], list[VhpcError]]:
    """Leave as much outside as is needed.

    The site's reserve grows to that, unless the site wants none.  The user's
    own is his word; but memory that devices can write to cannot be taken back
    from a guest, so with devices too little is an error.

    Returns:
        The size, notes, and no errors, or None and an error.
    """
    if needed_mib <= size.reserve_mib:
        return size, [], []
    asked = request.mem_reserve_mib
    what = f"QEMU, its page tables and shared folders on {allocation.node} may need {needed_mib} MiB"
    if asked is None and size.reserve_mib:
        left = max(0, allocation.memory_mib - needed_mib)
        return MemorySize(left, needed_mib), [f"{what}: so much of the job's memory stays outside"], []
    if asked is not None and devices:
        hint = f"ask for --vhpc-mem-reserve={needed_mib}M, or leave it out"
        return (
            None,
            [],
            [UserError(f"--vhpc-mem-reserve={asked}M is too little for a job with devices", what, hint)],
        )
    return size, [], []
