# SPDX-License-Identifier: Apache-2.0
"""A guest that libvirt or QEMU does not start: the job's own fault, or the node's?

Every node of the same make refuses the same domain.  If each were drained for
it, one job would take one node after the other out of service.  So when a
domain is refused another one is tried on the spot: the smallest guest that
this node could have, with nothing in it of what the job asked for.  If that
starts, the job fails and its node goes on; if not, the node is at fault.

What only this node lacks (memory, a device, a file) such a small guest does
not show.  libvirt and QEMU say it in the words of errno, and libvirt's picture
of the host can be compared with the kernel's.
"""
# Decision: After a refused guest, a small guest is tried

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from vhpc_slurm.architecture import of_machine
from vhpc_slurm.domain import iommu
from vhpc_slurm.domain.render import render
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import GuestCell, GuestPlan, GuestTopology, HostInventory, RunningGuest, VcpuPin
from vhpc_slurm.node.guest import capabilities, qemulog
from vhpc_slurm.node.guest.libvirtd import DomainRefusedError, Hypervisor, daemon

SMALLEST_MIB = 64
SMALLEST_START_S = 60.0
TCG_X2APIC = 9_000_000
"""QEMU's software emulation knows APIC IDs of more than eight bits since 9.0."""
LACKS = re.compile(
    r"cannot allocate memory|insufficient free host memory|no space left|input/output error"
    r"|resource busy|no such device|no such file|permission denied|operation not permitted"
    r"|too many open files|not viable|host doesn't support|not supported by the host|is unavailable",
    re.IGNORECASE,
)
"""Words of errno, of QEMU's VFIO and of libvirt about what a host lacks; libvirt 9.0 to 12.8 pass them on."""
_QEMU = re.compile(rf"{qemulog.PROGRAM}: (.+)$", re.MULTILINE)


class RefusedGuestError(UserError):
    """No node can start this guest; the node works, and operators get an alarm.

    Attributes:
        cause: QEMU's last words, or libvirt's: without what differs from one start to the next.
    """

    def __init__(self, node: str, cause: str) -> None:
        super().__init__(
            f"the guest of this job does not start on {node}",
            f"libvirt or QEMU refuses it, and starts others there: {cause}",
            "tell the site's support; another image or fewer CPUs per node may do",
        )
        self.cause = cause


def most_vcpus(hypervisor: Hypervisor, host: HostInventory, emulator: str) -> int:
    """How many vCPUs a guest of this node can have.

    Raises:
        NodeError: libvirt does not say.
    """
    arch = of_machine(host.arch)
    most = hypervisor.most_vcpus("kvm" if host.kvm else "qemu", arch, emulator)
    if arch.is_pc and not host.kvm and hypervisor.version()[1] < TCG_X2APIC:
        return min(most, iommu.ALL_CPUS)
    return most


def check_vcpus(
    hypervisor: Hypervisor, guests: Iterable[GuestPlan], host: HostInventory, emulator: str
) -> None:
    """See that no guest has more vCPUs than it can have; libvirt is asked only about large ones.

    Raises:
        UserError: one has.
        NodeError: libvirt does not say how many that are.
    """
    largest = max(len(guest.pins) for guest in guests)
    if largest <= iommu.ALL_CPUS:
        return
    most = most_vcpus(hypervisor, host, emulator)
    if largest > most:
        raise UserError(
            f"a guest of {largest} vCPUs is too large for {host.node}",
            f"the QEMU installed there gives a guest at most {most}",
            "ask for fewer CPUs per node, or have several guests on each: --vhpc-guests-per-node",
        )


def judge(
    hypervisor: Hypervisor, spec: DomainSpec, err: DomainRefusedError, *, own_image: bool = False
) -> NodeError | UserError:
    """Decide whether the job or the node caused the refusal of a guest.

    Args:
        hypervisor: libvirt.
        spec: the guest.
        err: the refusal.
        own_image: the image is of the user's own catalogue: no operator can repair it, and its user can
            have it refused at will.

    Returns:
        When libvirt and QEMU start another guest: RefusedGuestError, or UserError for an own image.
        Otherwise the node's error.
    """
    node = spec.host.node
    if LACKS.search(err.why):
        return err
    try:
        odd = capabilities.differences(spec.host, capabilities.parse(hypervisor.capabilities()))
        if odd:
            return NodeError(err.what, f"{err.why}; {odd[0]}", f"restart {daemon()}")
        small = smallest(spec)
        hypervisor.check(render(small))
        # no daemon serves this one's shares
        alone = replace(small, running=replace(small.running, shares=()))
        hypervisor.create(render(alone), SMALLEST_START_S, paused=True)
        hypervisor.destroy(spec.name)
    except NodeError as other:
        return NodeError(f"no guest starts on {node}", other.why, other.hint)
    said = _QEMU.findall(err.why)
    cause = f"QEMU: {said[-1].strip()}" if said else err.why
    if own_image:
        return UserError(
            f"the guest of this job does not start on {node}",
            f"libvirt or QEMU refuses it, and starts others there: {cause}",
            "check your image, its kernel first, or ask for fewer CPUs per node",
        )
    return RefusedGuestError(node, cause)


def smallest(spec: DomainSpec) -> DomainSpec:
    """The same guest with nothing that job or image decide: one vCPU, little memory, at most one share.

    What stays is the node's: its QEMU and libvirt, users, files and sockets, and its copy of the root.
    """
    guest, paths = spec.guest, spec.guest.paths
    pin, cell = guest.pins[0], guest.cells[0]
    plan = GuestPlan(
        guest.index,
        guest.hostname,
        pins=(VcpuPin(0, pin.os_cpu, 0),),
        topology=GuestTopology(1, 1, 1, 1),
        cells=(GuestCell(0, (0,), SMALLEST_MIB, cell.host_cell),),
        memory_mib=SMALLEST_MIB,
        emulator_cpus=(pin.os_cpu,),
        emulator_choice="",
        paths=replace(paths, kernel="", initrd="", disk=""),
    )
    running = RunningGuest(plan, spec.running.uid, spec.running.shares[:1])
    return replace(spec, running=running, manifest=replace(spec.manifest, cmdline=""))
