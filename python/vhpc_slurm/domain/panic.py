# SPDX-License-Identifier: Apache-2.0
"""pvpanic: a guest's kernel panic ends the domain at once instead of at the boot deadline."""

from __future__ import annotations

from dataclasses import dataclass

from vhpc_slurm.domain.spec import DomainSpec


@dataclass(frozen=True)
class PanicContext:
    """Values of the panic template."""

    model: str


def context(_spec: DomainSpec) -> PanicContext:
    """The ISA device: the PCI one needs libvirt 9.1."""
    return PanicContext("isa")
