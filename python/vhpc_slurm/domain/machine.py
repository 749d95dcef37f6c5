# SPDX-License-Identifier: Apache-2.0
"""The bare machine: QEMU binary and controllers; no USB, no balloon, no video."""

from __future__ import annotations

from dataclasses import dataclass

from vhpc_slurm.domain import slots
from vhpc_slurm.domain.spec import DomainSpec


@dataclass(frozen=True)
class MachineContext:
    """Values of the machine template; an empty ``emulator`` is libvirt's choice."""

    emulator: str
    serial_slot: int


def context(spec: DomainSpec) -> MachineContext:
    """Emulator; what is absent boots faster and cannot be attacked."""
    return MachineContext(spec.emulator, slots.SERIAL)
