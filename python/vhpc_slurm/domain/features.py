# SPDX-License-Identifier: Apache-2.0
"""Platform features: the interrupt controller, paravirtual hints, the performance counters.

Without a UEFI an Arm guest has no ACPI tables, but a device tree; libvirt refuses ACPI there. GICv3 has an
ITS, which the messages of PCI devices need, and no limit of eight CPUs as GICv2 has.
"""

from __future__ import annotations

from vhpc_slurm.domain import iommu
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.record import Record


class FeaturesContext(Record, frozen=True):
    """Values of the features template; ``ioapic`` is whose the I/O APIC is, empty for libvirt's choice."""

    is_pc: bool
    acpi: bool

    kvm: bool
    ioapic: str


def context(spec: DomainSpec) -> FeaturesContext:
    """With KVM: all of the APIC in the kernel, dedicated CPUs announced, perf usable in the guest.

    Where interrupts are remapped only the I/O APIC is QEMU's: its few lines are
    those of the console; devices and vCPUs send messages, which stay in the
    kernel.  The guest is never told that it is on bare metal: hiding KVM would
    cost it kvmclock and the hint that its CPUs are its own.
    """
    arch = spec.architecture
    ioapic = "qemu" if iommu.needed(spec.guest.topology, arch) else "kvm" if spec.kvm else ""
    return FeaturesContext(arch.is_pc, arch.is_pc or bool(spec.firmware), spec.kvm, ioapic)
