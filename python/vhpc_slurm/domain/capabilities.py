# SPDX-License-Identifier: Apache-2.0
"""A capability of QEMU that libvirt does not use for a guest, because it makes the start slow.

Before a guest runs, libvirt reads its CPU features.  With QEMU's ``unavailable-features`` it asks for each of
some 465 properties separately (``qemuMonitorJSONGetGuestCPU``).  Without it libvirt reads the CPUID words, in
three questions.  The domain's CPU has no check, so only the live XML depends on the rest.
"""
# Decision: libvirt does not ask for each CPU feature of a guest

from __future__ import annotations

from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.record import Record

UNAVAILABLE_FEATURES = "cpu-unavailable-features"


class CapabilitiesContext(Record, frozen=True):
    """libvirt's name of the capability that it is told QEMU lacks."""

    without: str


def context(spec: DomainSpec) -> CapabilitiesContext | None:
    """None for Arm guests, whose QEMU has no such property."""
    return CapabilitiesContext(UNAVAILABLE_FEATURES) if spec.architecture.is_pc else None
