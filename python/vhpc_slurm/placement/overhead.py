# SPDX-License-Identifier: Apache-2.0
"""Memory that guests need outside of their own memory; docs/memory.md has the formula and its sources."""

from __future__ import annotations

from vhpc_slurm.config import Config
from vhpc_slurm.device import HostDevice
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import JobRequest, NodeAllocation
from vhpc_slurm.placement.devices import Wanted
from vhpc_slurm.placement.memory import MemorySize, size_memory

QEMU_MIB = 128
VCPU_MIB = 2
SHARE_MIB = 8
PASST_MIB = 16
TABLE_SHARE = 512
"""Memory per page table: an entry of eight bytes maps a page of 4 KiB."""


def outside_mib(guests_mib: int, vcpus: int, wanted: Wanted, request: JobRequest, config: Config) -> int:
    """Largest memory need of a job's guests on a node in addition to their own memory, in MiB.

    Args:
        guests_mib: memory of all guests.
        vcpus: vCPUs of all guests.
        wanted: devices of all guests.
        request: has the number of guests.
        config: has page size and shared folders.
    """
    largest_vfs = sorted(map(_bars, wanted.pool), reverse=True)[: wanted.vfs]
    bars = sum(map(_bars, wanted.gpus)) + sum(largest_vfs)
    devices = bool(wanted.gpus or wanted.vfs)
    return _sum_mib(guests_mib, vcpus, request, config, devices=devices, bars=bars)


def _sum_mib(
    guests_mib: int, vcpus: int, request: JobRequest, config: Config, *, devices: bool, bars: int
) -> int:
    """Sum of QEMU and the daemons of shares and nat, threads, and page tables.

    Page tables are those of QEMU, KVM, each daemon, and with devices
    the IOMMU.  QEMU and KVM map BARs in ordinary pages, regardless of the
    guest's page size.
    """
    shares = config.shares.home + config.shares.work_dir + len(config.shares.site)
    passt = "nat" in config.network.parts(request.network)
    fixed = request.guests_per_node * (QEMU_MIB + SHARE_MIB * shares + PASST_MIB * passt) + VCPU_MIB * vcpus
    huge = config.placement.hugepages in ("2M", "1G")
    tables = 0 if huge else guests_mib * (2 + shares + passt + devices) // TABLE_SHARE
    return fixed + tables + 2 * (bars >> 20) // TABLE_SHARE


def _bars(device: HostDevice) -> int:
    return sum(bar.size for bar in device.bars if bar.memory)


def at_least(
    allocation: NodeAllocation, request: JobRequest, config: Config, reasons: list[VhpcError]
) -> MemorySize | None:
    """The part of a node's calculation that needs no access to the node: everything except BARs.

    Returns:
        Largest memory of the guests and smallest memory outside of them; None if there
        are reasons against it, which the node would report.
    """
    size = size_memory(allocation, request, config.guests.memory_reserve_mib, reasons)
    if size is None:
        return None
    counted = {gres.name for gres in allocation.gres if gres.count}
    vfs = config.placement.vf_gres in counted if request.vfs is None else request.vfs > 0
    devices = vfs or config.placement.gpu_gres in counted
    needed = _sum_mib(size.guests_mib, len(allocation.cpu_ids), request, config, devices=devices, bars=0)
    return cover(size, needed, allocation, request, reasons, devices=devices)


def cover(
    size: MemorySize,
    needed_mib: int,
    allocation: NodeAllocation,
    request: JobRequest,
    reasons: list[VhpcError],
    *,
    devices: bool,
) -> MemorySize | None:
    """Make the reserve as large as needed; None with a reason against it.

    The site's default reserve is increased, unless it is 0.  The user's own
    value is not changed; but with devices a value that is too small is an
    error, because memory that devices can write to cannot be reclaimed.
    """
    if needed_mib <= size.reserve_mib:
        return size
    asked = request.mem_reserve_mib
    what = f"QEMU, its page tables and shared folders on {allocation.node} may need {needed_mib} MiB"
    if asked is None and size.reserve_mib:
        left = max(0, allocation.memory_mib - needed_mib)
        return MemorySize(left, needed_mib, (f"{what}: this part of the job's memory stays outside",))
    if asked is not None and devices:
        hint = f"ask for --vhpc-mem-reserve={needed_mib}M, or omit the option"
        reasons.append(
            UserError(f"--vhpc-mem-reserve={asked}M is too small for a job with devices", what, hint)
        )
        return None
    return size
