"""How much memory a guest gets, and from which NUMA cells of the host."""

from __future__ import annotations

from dataclasses import dataclass

from vhpc_slurm.errors import NodeError, UserError, VhpcError
from vhpc_slurm.model import (
    HostInventory,
    ImageManifest,
    JobRequest,
    MemoryBinding,
    NodeAllocation,
)

GRAIN_MIB = 2  # one huge page: transparent and explicit 2 MiB pages then map all of it


@dataclass(frozen=True)
class MemorySize:
    """Memory of the guest and what stays outside of it, in MiB."""

    guest_mib: int
    reserve_mib: int


@dataclass(frozen=True)
class MemoryPlacement:
    """Host cells that guest memory comes from, nearest first, and how firmly."""

    host_cell: int
    nodeset: tuple[int, ...]
    binding: MemoryBinding
    notes: tuple[str, ...] = ()


def size_memory(
    allocation: NodeAllocation,
    request: JobRequest,
    manifest: ImageManifest,
    host: HostInventory,
    default_reserve_mib: int,
) -> tuple[MemorySize | None, list[VhpcError]]:
    """Memory of the job on this node, less what stays outside, rounded down to 2 MiB.

    Returns:
        The size and no errors, or None and every error found.
    """
    asked = request.mem_reserve_mib
    reserve = default_reserve_mib if asked is None else asked
    if reserve < 0:
        return None, [UserError(f"--vhpc-mem-reserve={reserve}M is negative")]
    if allocation.memory_mib <= 0:
        return None, [
            NodeError(
                f"Slurm reports no memory for the job on {host.node}",
                "guests are sized from the job's memory",
                "set SelectTypeParameters=CR_Core_Memory in slurm.conf",
            )
        ]
    guest = max(0, allocation.memory_mib - reserve) // GRAIN_MIB * GRAIN_MIB
    errors: list[VhpcError] = []
    if guest == 0 or guest < manifest.min_memory_mib:
        errors.append(_too_little(allocation, manifest, host, guest, reserve, asked is not None))
    total = sum(cell.memory_mib for cell in host.cells)
    if guest > total:
        errors.append(
            NodeError(
                f"the guest would have {guest} MiB, but {host.node} has {total} MiB in all",
                "",
                "correct RealMemory in slurm.conf: slurmd -C",
            )
        )
    return (None, errors) if errors else (MemorySize(guest, reserve), [])


def _too_little(
    allocation: NodeAllocation,
    manifest: ImageManifest,
    host: HostInventory,
    guest: int,
    reserve: int,
    reserve_is_the_users: bool,
) -> UserError:
    least = max(manifest.min_memory_mib, GRAIN_MIB)
    needed = -(-least // GRAIN_MIB) * GRAIN_MIB + reserve
    cure = f"ask for at least --mem={needed}M"
    if reserve_is_the_users:
        cure += " or for a smaller --vhpc-mem-reserve"
    return UserError(
        f"image {manifest.name}:{manifest.tag} needs {least} MiB, a guest on {host.node} has {guest}",
        f"of the job's {allocation.memory_mib} MiB there {reserve} MiB stay outside the guest",
        cure,
    )


def place_memory(os_cpus: tuple[int, ...], guest_mib: int, host: HostInventory) -> MemoryPlacement:
    """Choose host cells for the memory of a guest with one cell.

    Slurm hands out memory by the node, not by the cell, so a cell of a shared
    node may be full although the job's memory is there.  A strict binding then
    gets QEMU killed by the kernel.  It is used only where the job holds every
    CPU of the cells and they are large enough; else memory prefers the one
    cell of the vCPUs, or falls where pinned vCPUs touch it first.
    """
    used = [cell for cell in host.cells if set(cell.cpus) & set(os_cpus)]
    near = max(used, key=lambda cell: (len(set(cell.cpus) & set(os_cpus)), -cell.cell))
    nodeset = tuple(sorted(cell.cell for cell in used))
    capacity = sum(cell.memory_mib for cell in used)
    alone = all(set(cell.cpus) <= set(os_cpus) for cell in used)
    if guest_mib <= capacity and alone:
        return MemoryPlacement(near.cell, nodeset, MemoryBinding.STRICT)
    notes = []
    if guest_mib > capacity:
        cells = ", ".join(map(str, nodeset))
        notes.append(f"{guest_mib} MiB do not fit NUMA cell {cells} of the job's CPUs: some will be remote")
    if len(used) == 1:
        return MemoryPlacement(near.cell, nodeset, MemoryBinding.PREFERRED, tuple(notes))
    return MemoryPlacement(near.cell, nodeset, MemoryBinding.NONE, tuple(notes))
