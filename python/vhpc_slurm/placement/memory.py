# SPDX-License-Identifier: Apache-2.0
"""Memory of guests: size, guest NUMA cells, and the host cells that it comes from."""
# Decision: Guest memory and NUMA

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vhpc_slurm.errors import NodeError, UserError, VhpcError
from vhpc_slurm.model import (
    GuestCell,
    HostCell,
    HostCpu,
    HostInventory,
    JobRequest,
    MemoryBinding,
    NodeAllocation,
)
from vhpc_slurm.placement.input import PlanInput
from vhpc_slurm.placement.split import share
from vhpc_slurm.record import Record

GRAIN_MIB = 2  # one huge page: transparent and explicit 2 MiB pages then map all of it
LOCAL, REMOTE_LEAST, REMOTE_MOST = 10, 11, 254  # distances that libvirt accepts
FAR = 1 << 16


class MemorySize(Record, frozen=True):
    """Memory of all guests on the node, before rounding, and the reserve outside of guests, in MiB."""

    guests_mib: int
    reserve_mib: int
    notes: tuple[str, ...] = ()


class MemoryPlacement(Record, frozen=True):
    """Guest cells with their vCPUs and memory, and how the memory is bound to host cells."""

    cells: tuple[GuestCell, ...]
    binding: MemoryBinding
    notes: tuple[str, ...] = ()

    @property
    def memory_mib(self) -> int:
        """Memory of all cells, in MiB."""
        return sum(cell.memory_mib for cell in self.cells)


def size_memory(
    allocation: NodeAllocation,
    request: JobRequest,
    default_reserve_mib: int,
    reasons: list[VhpcError],
) -> MemorySize | None:
    """Memory of the job on this node, minus the reserve outside of guests; None with a reason against it."""
    asked = request.mem_reserve_mib
    reserve = default_reserve_mib if asked is None else asked
    if reserve < 0:
        reasons.append(UserError(f"--vhpc-mem-reserve={reserve}M is negative"))
        return None
    if allocation.memory_mib <= 0:
        reasons.append(
            NodeError(
                f"Slurm reports no memory for the job on {allocation.node}",
                "guests are sized from the job's memory",
                "set SelectTypeParameters=CR_Core_Memory in slurm.conf",
            )
        )
        return None
    return MemorySize(max(0, allocation.memory_mib - reserve), reserve)


def check_size(
    what: PlanInput, guest_mib: Sequence[int], reserve_mib: int, grain_mib: int = GRAIN_MIB
) -> list[VhpcError]:
    """Errors if the smallest guest is too small for the image, or all guests too large for the node."""
    errors: list[VhpcError] = []
    host, manifest = what.host, what.image.manifest
    least = max(manifest.min_memory_mib, GRAIN_MIB)
    if min(guest_mib) < least:
        count = len(guest_mib)
        needed = -(-least // grain_mib) * grain_mib * count + reserve_mib
        hint = f"ask for at least --mem={needed}M"
        if what.request.mem_reserve_mib is not None:
            hint += " or for a smaller --vhpc-mem-reserve"
        if count > 1:
            hint += " or for fewer guests"
        errors.append(
            UserError(
                f"image {manifest.name}:{manifest.tag} needs {least} MiB, "
                f"a guest on {host.node} has {min(guest_mib)}",
                f"of the job's {what.allocation.memory_mib} MiB there, "
                f"{reserve_mib} MiB stay outside the guest"
                + (f", {count} guests share the rest" if count > 1 else ""),
                hint,
            )
        )
    total = host.memory_mib
    if sum(guest_mib) > total:
        errors.append(
            NodeError(
                f"guests of the job would have {sum(guest_mib)} MiB, but {host.node} has {total} MiB in all",
                "",
                "correct RealMemory in slurm.conf: slurmd -C",
            )
        )
    return errors


def lay_out(
    chosen: Sequence[HostCpu], guest_mib: int, grain_mib: int, host: HostInventory
) -> MemoryPlacement:
    """One guest cell for each host cell in use, with memory in proportion to its vCPUs.

    A guest cell gets more memory than its host cell has only if all host cells
    are full.  CPUs of a cell without memory belong to the guest cell of the
    nearest host cell with memory.

    Args:
        chosen: CPUs of the guest in the order of its vCPUs.
        guest_mib: memory of the guest, a multiple of ``grain_mib``.
        grain_mib: page size.
        host: inventory of the node.
    """
    home_of = {number: home(number, host) for number in {cpu.cell for cpu in chosen}}
    used = list({h.cell: h for cpu in chosen if (h := home_of[cpu.cell]) is not None}.values())
    if None in home_of.values():
        cells = tuple(cell.cell for cell in host.memory_cells)
        alone = GuestCell(0, tuple(range(len(chosen))), guest_mib, cells[0], nodeset=cells)
        return MemoryPlacement((alone,), MemoryBinding.NONE, ("some CPUs are not in an online NUMA cell",))
    place = {number: used.index(cell) for number, cell in home_of.items() if cell is not None}
    members: list[list[int]] = [[] for _ in used]
    for vcpu, cpu in enumerate(chosen):
        members[place[cpu.cell]].append(vcpu)
    vcpus = [tuple(numbers) for numbers in members]
    grains = guest_mib // grain_mib
    if grains < len(used):  # not enough for one page per cell
        near = max(range(len(used)), key=lambda at: len(vcpus[at]))
        alone = GuestCell(
            0, tuple(range(len(chosen))), guest_mib, used[near].cell, nodeset=(used[near].cell,)
        )
        note = f"{guest_mib} MiB have fewer pages than there are NUMA cells in use: the guest sees one cell"
        return MemoryPlacement((alone,), MemoryBinding.PREFERRED, (note,))
    parts, fits = _fill(grains, [len(v) for v in vcpus], [cell.memory_mib // grain_mib for cell in used])
    notes: tuple[str, ...] = ()
    if not fits:
        names = ", ".join(str(cell.cell) for cell in sorted(used, key=lambda cell: cell.cell))
        notes = (f"{guest_mib} MiB do not fit NUMA cell {names} of the job's CPUs: some memory is remote",)
    return MemoryPlacement(
        tuple(
            GuestCell(
                cell=number,
                vcpus=vcpus[number],
                memory_mib=parts[number] * grain_mib,
                host_cell=cell.cell,
                distances=_distances(number, used),
                nodeset=(cell.cell,),
            )
            for number, cell in enumerate(used)
        ),
        MemoryBinding.PREFERRED,
        notes,
    )


def bind(
    placements: Sequence[MemoryPlacement], job_cpus: set[int], host: HostInventory, *, hugepages: bool
) -> list[MemoryPlacement]:
    """Bind the memory of a job's guests strictly if that cannot get them killed.

    Slurm allocates memory per node, not per cell, so a cell of a shared node
    may be full although the node has the job's memory.  With a strict binding
    the kernel then kills QEMU.  Therefore the binding is strict only if the job
    holds every CPU of the cells and they are large enough, or if the memory
    consists of huge pages, which were counted: too few of them fail the start.
    """
    homes = {cell.cell: home(cell.cell, host) for cell in host.cells}
    needed: dict[int, int] = {}
    for placement in placements:
        for cell in placement.cells:
            needed[cell.host_cell] = needed.get(cell.host_cell, 0) + cell.memory_mib
    capacity = {cell.cell: cell.memory_mib for cell in host.cells}

    def safe(number: int) -> bool:
        own = {c for cell in host.cells if (h := homes[cell.cell]) and h.cell == number for c in cell.cpus}
        return own <= job_cpus and needed[number] <= capacity[number]

    def firm(placement: MemoryPlacement) -> bool:
        if placement.binding is not MemoryBinding.PREFERRED:
            return False
        return hugepages or all(safe(cell.host_cell) for cell in placement.cells)

    return [replace(p, binding=MemoryBinding.STRICT) if firm(p) else p for p in placements]


def home(number: int, host: HostInventory) -> HostCell | None:
    """The cell itself if it has memory, otherwise the nearest cell with memory; None for an offline cell."""
    own = next((cell for cell in host.cells if cell.cell == number), None)
    if own is None or own.memory_mib:
        return own
    far = dict(own.distances)
    some = [cell for cell in host.memory_cells if cell.memory_mib]
    return min(some, key=lambda cell: (far.get(cell.cell, FAR), cell.cell), default=None)


def _fill(grains: int, weights: Sequence[int], room: Sequence[int]) -> tuple[list[int], bool]:
    """Grains in proportion to weights, at least one each; the excess of full cells goes to the others.

    Returns:
        Grains by cell, and whether every cell has room for its grains.
    """
    if grains > sum(room) or 0 in room:
        return [1 + extra for extra in share(grains - len(weights), weights)], False
    parts = [0] * len(weights)
    left = grains
    while left:
        open_ = [at for at in range(len(weights)) if parts[at] < room[at]]
        for at, extra in zip(open_, share(left, [weights[at] for at in open_]), strict=True):
            taken = min(extra, room[at] - parts[at])
            parts[at] += taken
            left -= taken
    for poor in (at for at in range(len(parts)) if parts[at] == 0):
        rich = max(range(len(parts)), key=parts.__getitem__)
        parts[rich] -= 1
        parts[poor] += 1
    return parts, True


def _distances(number: int, used: Sequence[HostCell]) -> tuple[tuple[int, int], ...]:
    """The host's distances between the guest's cells; empty if the host does not report all of them."""
    rows = [dict(cell.distances) for cell in used]
    if len(used) < 2 or any(other.cell not in row for row in rows for other in used):
        return ()
    return tuple(
        (at, LOCAL if at == number else min(max(rows[number][other.cell], REMOTE_LEAST), REMOTE_MOST))
        for at, other in enumerate(used)
    )
