"""Platform features: the interrupt controller, paravirtual hints, the performance counters."""

from __future__ import annotations

from dataclasses import dataclass

from vhpc_slurm.domain.spec import DomainSpec


@dataclass(frozen=True)
class FeaturesContext:
    """Values of the features template."""

    kvm: bool


def context(spec: DomainSpec) -> FeaturesContext:
    """With KVM: all of the APIC in the kernel, dedicated CPUs announced, perf usable in the guest.

    The guest is never told that it is on bare metal: hiding KVM would cost it
    kvmclock and the hint that its CPUs are its own.
    """
    return FeaturesContext(kvm=spec.kvm)
