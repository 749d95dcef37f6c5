# SPDX-License-Identifier: Apache-2.0
"""APIC IDs of eight bits reach 255 vCPUs at most; beyond that, an IOMMU that remaps interrupts.

An interrupt message has room for an APIC ID of eight bits; the value 255 means
all CPUs.  Remapping gives it 32.  libvirt refuses more than 255 vCPUs without
(extended interrupt mode, ``eim``), and remapping needs an I/O APIC outside of
the kernel (``<ioapic driver="qemu"/>``).  IDs have gaps where the numbers of
threads, cores and sockets are no powers of two, so that fewer than 256 vCPUs
can need it as well.

The model is Intel's for hosts of either vendor: Linux looks for its ACPI table
on any CPU, and libvirt knows AMD's with 32-bit IDs only in newer releases.
Its DMA translation is not used: it would cost each transfer of a
passed-through device: it is switched off here where libvirt can, and on the
kernel's command line (boot.py), which leaves remapping as it is.

Sources: Intel 64 and IA-32 SDM volume 3 (x2APIC, topology enumeration), Intel
VT-d specification (interrupt remapping), https://libvirt.org/formatdomain.html.
"""
# Decision: An Intel IOMMU for large guests, on hosts of either vendor

from __future__ import annotations

from vhpc_slurm.architecture import Architecture
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.model import GuestTopology
from vhpc_slurm.record import Record

ALL_CPUS = 255
"""The ID of eight bits that means all CPUs, so it is no CPU's own."""
NO_TRANSLATION = 11_003_000
"""libvirt 11.3 knows dma_translation; 9.0 ignores it."""


class IommuContext(Record, frozen=True):
    """Values of the iommu template.

    ``caching_mode``: QEMU assigns no device behind this IOMMU without.
    """

    caching_mode: bool
    no_translation: bool


def highest_id(topology: GuestTopology) -> int:
    """The APIC ID of the last vCPU: threads and cores have a field of whole bits each."""
    number = topology.sockets - 1
    for count in (topology.cores, topology.threads):
        number = (number << (count - 1).bit_length()) + count - 1
    return number


def needed(topology: GuestTopology, architecture: Architecture) -> bool:
    """Whether some vCPU has an APIC ID of more than eight bits; an Arm machine has none (GICv3)."""
    return architecture.is_pc and highest_id(topology) >= ALL_CPUS


def context(spec: DomainSpec) -> IommuContext | None:
    """None for guests that get along without."""
    if not needed(spec.guest.topology, spec.architecture):
        return None
    return IommuContext(bool(spec.guest.devices), spec.libvirt_version >= NO_TRANSLATION)
