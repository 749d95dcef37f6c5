# SPDX-License-Identifier: Apache-2.0
"""Time: the host's TSC and kvmclock with KVM; no HPET, whose emulation costs an exit at every read."""

from __future__ import annotations

from dataclasses import dataclass

from vhpc_slurm.domain.spec import DomainSpec


@dataclass(frozen=True)
class ClockContext:
    """Values of the clock template."""

    kvm: bool


def context(spec: DomainSpec) -> ClockContext:
    """Timers."""
    return ClockContext(kvm=spec.kvm)
