# SPDX-License-Identifier: Apache-2.0
"""The parts of a domain that have no logic: their templates print constants and values of the spec.

Why they are as they are:

- ``machine``: no USB, no balloon, no video: what is absent boots faster and cannot be attacked.
- ``clock``: the host's TSC and kvmclock with KVM; no HPET, whose emulation costs an exit at every read.
  An Arm guest has the timer of its CPUs.
- ``lifecycle``: power off, reboot and crash all destroy the guest: it must not come back by itself.
- ``channel``: the agent's virtio-serial port is guarded by the permissions of a socket, unlike vsock.
- ``console``: the serial port goes to a file, which shows what a guest printed while it booted or died.
- ``rng``: the host's non-blocking generator, so that a guest's boot does not wait for entropy.
- ``panic``: pvpanic ends the domain at a kernel panic instead of at the boot deadline; on PCs the ISA
  device, because the PCI one needs libvirt 9.1.
- ``serial_ports``: the channels, and port 0, which is for consoles.  libvirt's default of 31 ports
  has 64 queues, and QEMU's main loop, on the way of each packet, polls a descriptor for each of them.
- ``security``: QEMU under a uid of this guest alone, so that an escape finds no files or processes of
  other guests.  Numeric ids need no passwd entry.  libvirt gives sockets, kernel and initrd to that uid
  (relabel); seccomp and the mount namespace are set for all guests in qemu.conf.
"""

from __future__ import annotations

from vhpc_slurm.domain import slots
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.record import Record

PORT_NAME = "org.vhpc.agent.0"
SERIAL_PORTS = 2
"""Without the port for locks."""


class PlainContext(Record, frozen=True):
    """Values of these templates; an empty ``emulator`` is libvirt's choice."""

    kvm: bool
    is_pc: bool
    emulator: str
    agent_socket: str
    port_name: str
    console_log: str
    serial_slot: int
    serial_ports: int
    rng_slot: int
    panic: str
    panic_slot: int
    uid: int
    gid: int


def context(spec: DomainSpec) -> PlainContext:
    """The same values for all of them."""
    return PlainContext(
        kvm=spec.kvm,
        is_pc=spec.architecture.is_pc,
        emulator=spec.emulator,
        agent_socket=spec.guest.paths.agent_socket,
        port_name=PORT_NAME,
        console_log=spec.guest.paths.console_log,
        serial_slot=slots.SERIAL,
        serial_ports=SERIAL_PORTS + spec.running.has_locks,
        rng_slot=slots.RNG,
        panic=spec.architecture.panic,
        panic_slot=slots.PANIC,
        uid=spec.running.uid,
        gid=spec.gid,
    )
