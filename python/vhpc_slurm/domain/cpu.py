# SPDX-License-Identifier: Apache-2.0
"""The guest's CPU model: the host's own with KVM, everything that TCG can emulate without.

On Arm libvirt knows no names of features, no caches and no width of addresses.
"""

from __future__ import annotations

from dataclasses import replace

from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.model import GuestTopology
from vhpc_slurm.record import Record

CLUSTERS_SINCE = 10_001_000
"""The version of libvirt whose domain XML first has clusters in its CPU topology."""
AMD = ("AuthenticAMD", "HygonGenuine")


class Cell(Record, frozen=True):
    """A guest NUMA cell; ``distances`` is empty where there is only one cell."""

    id: int
    cpus: str
    memory_mib: int
    distances: tuple[tuple[int, int], ...]


class Feature(Record, frozen=True):
    """A CPU feature and libvirt's policy for it."""

    name: str
    policy: str


class CpuContext(Record, frozen=True):
    """Values of the cpu template; ``host`` means host-passthrough, ``saveable`` only what QEMU can save."""

    is_pc: bool

    host: bool
    saveable: bool
    topology: GuestTopology
    features: tuple[Feature, ...]
    cells: tuple[Cell, ...]


def _features(spec: DomainSpec) -> tuple[Feature, ...]:
    """No nested virtualization for tenants; a stable TSC and real SMT siblings where they exist.

    An Arm guest starts without EL2, so it cannot nest.
    """
    if not spec.architecture.is_pc:
        return ()
    no_nesting = (Feature("svm", "disable"), Feature("vmx", "disable"))
    if not spec.kvm:
        # Told of them the guest's kernel copies by `rep movsb`, which TCG emulates byte by byte.
        fast_strings = (Feature("erms", "disable"), Feature("fsrm", "disable"))
        return (*fast_strings, *no_nesting)
    # QEMU leaves topoext off for host-passthrough; an AMD guest then sees no siblings.
    siblings = (Feature("topoext", "require"),) if spec.host.cpu_vendor in AMD else ()
    # libvirt starts no guest that requires what the host has not: a node that is itself a virtual machine;
    # QEMU does not save a guest that has it
    stable = (Feature("invtsc", "require"),) if spec.host.invariant_tsc and not spec.saveable else ()
    return (*stable, *siblings, *no_nesting)


def _topology(spec: DomainSpec) -> GuestTopology:
    """That of the plan; without clusters where libvirt cannot describe them."""
    shape = spec.guest.topology
    if spec.libvirt_version >= CLUSTERS_SINCE:
        return shape
    return replace(shape, clusters=1, cores=shape.clusters * shape.cores)


def context(spec: DomainSpec) -> CpuContext:
    """CPU model, topology and NUMA cells."""
    guest = spec.guest
    several = len(guest.cells) > 1
    return CpuContext(
        is_pc=spec.architecture.is_pc,
        host=spec.kvm,
        saveable=spec.saveable,
        topology=_topology(spec),
        features=_features(spec),
        cells=tuple(
            Cell(cell.cell, format_cpu_list(cell.vcpus), cell.memory_mib, cell.distances if several else ())
            for cell in guest.cells
        ),
    )
