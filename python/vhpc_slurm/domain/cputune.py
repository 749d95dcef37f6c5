# SPDX-License-Identifier: Apache-2.0
"""Which host CPUs run which thread of QEMU, and the control group that it is in."""

from __future__ import annotations

from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.model import VcpuPin
from vhpc_slurm.record import Record

IOTHREADS = 1


class CputuneContext(Record, frozen=True):
    """Values of the cputune template; CPU lists are in libvirt's syntax."""

    pins: tuple[VcpuPin, ...]
    emulator_cpus: str
    iothreads: range
    partition: str


def context(spec: DomainSpec) -> CputuneContext:
    """vCPUs one to one; main loop and I/O threads on their stated set, else they could run anywhere."""
    guest = spec.guest
    return CputuneContext(
        guest.pins, format_cpu_list(guest.emulator_cpus), range(1, IOTHREADS + 1), spec.partition
    )
