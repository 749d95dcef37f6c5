# SPDX-License-Identifier: Apache-2.0
"""Which host NUMA cells guest memory comes from."""

from __future__ import annotations

from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.model import GuestCell, MemoryBinding
from vhpc_slurm.record import Record


class CellBinding(Record, frozen=True):
    """A guest cell and the host cells, as a list, that its memory comes from."""

    cell: int
    nodeset: str


class NumatuneContext(Record, frozen=True):
    """Values of the numatune template; ``nodeset`` is empty where each cell has to speak for itself."""

    mode: str
    nodeset: str
    cells: tuple[CellBinding, ...]


def _nodeset(cell: GuestCell) -> tuple[int, ...]:
    return cell.nodeset or (cell.host_cell,)


def context(spec: DomainSpec) -> NumatuneContext | None:
    """As planned; None leaves memory where the pinned vCPUs touch it first."""
    binding, cells = spec.guest.memory_binding, spec.guest.cells
    if binding is MemoryBinding.NONE:
        return None
    nodes = {host_cell for cell in cells for host_cell in _nodeset(cell)}
    # libvirt prefers one node at most: with several, only each cell's own preference can be said
    several = binding is MemoryBinding.PREFERRED and len(nodes) > 1
    return NumatuneContext(
        mode=binding.value,
        nodeset="" if several else format_cpu_list(nodes),
        cells=tuple(CellBinding(cell.cell, format_cpu_list(_nodeset(cell))) for cell in cells),
    )
