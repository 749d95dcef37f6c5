# SPDX-License-Identifier: Apache-2.0
"""A plan as text: the place of each vCPU, NUMA cell and device, and the numbers behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vhpc_slurm.cli import output
from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.model import GuestPlan, JobRequest, NodePlan, NodeSegment
from vhpc_slurm.placement.plan import Refusal
from vhpc_slurm.terminal import printable, short_digests

if TYPE_CHECKING:
    from vhpc_slurm.placement.input import PlanInput

NO_JOB = 0xFFFFFFFE
"""Job id in a plan for a hypothetical job: Slurm's NO_VAL, which no job has."""


def show(case: PlanInput, plan_: NodePlan, accelerated: tuple[str, str], libvirt_uri: str) -> None:
    """Print a plan; ``accelerated`` is kvm or tcg, and why."""
    accelerator, why = accelerated
    name = "QEMU with KVM" if accelerator == "kvm" else "QEMU in software (TCG), many times slower"
    generation = str(plan_.generation) if case.generation.job_id != NO_JOB else "none (a hypothetical job)"
    segment = plan_.segment
    output.write_facts(
        [
            ("node", plan_.node),
            ("generation", generation),
            ("image", f"{case.image.ref.label} ({short_digests(case.image.digest)})"),
            ("hypervisor", f"{name}: {why}; {libvirt_uri}"),
            ("memory", _memory(case, plan_)),
            *([("mounts", case.request.mounts)] if case.request.mounts else []),
            *([("variables", case.request.env)] if case.request.env else []),
            *([("starts in", case.request.start_dir)] if case.request.start_dir else []),
            *([("from a file", _from_file(case.request))] if case.request.environment else []),
            *([("network", _segment(segment))] if segment else []),
        ]
    )
    for guest in plan_.guests:
        _show_guest(case, guest, segment.mtu if segment else 0)
    if case.shares:
        print()
        output.write_table(
            ("SHARE", "PATH", "ACCESS", "WHY"),
            [(s.tag, s.path, "read-only" if s.read_only else "read-write", s.why) for s in case.shares],
        )
    for note in (*plan_.notes, *case.notes):
        print(f"note: {printable(note)}")


def _from_file(request: JobRequest) -> str:
    return f"{request.environment}: {', '.join(request.from_file) or 'no option'}"


def _memory(case: PlanInput, plan_: NodePlan) -> str:
    reserve = "guests.memory_reserve_mib" if case.request.mem_reserve_mib is None else "--vhpc-mem-reserve"
    guests = sum(guest.memory_mib for guest in plan_.guests)
    rounded = plan_.job_memory_mib - plan_.reserve_mib - guests
    text = f"{plan_.job_memory_mib} MiB of the job - {plan_.reserve_mib} MiB outside ({reserve})"
    if rounded:
        text += f" - {rounded} MiB of rounding"
    whom = "the guest" if len(plan_.guests) == 1 else f"{len(plan_.guests)} guests"
    return f"{text} = {guests} MiB for {whom}; the image needs {case.image.manifest.min_memory_mib} MiB"


def _segment(segment: NodeSegment) -> str:
    text = f"VNI {segment.vni} from {segment.local} port {segment.port}"
    if segment.tunnel is not None:
        text += f", in WireGuard on UDP port {segment.tunnel.port}"
    return text + (", multicast to all nodes of the job" if segment.flood else "")


def _show_guest(case: PlanInput, guest: GuestPlan, mtu: int) -> None:
    topology = guest.topology
    shape = " x ".join(
        f"{count} {name}"
        for count, name in (
            (topology.sockets, "sockets"),
            (topology.clusters, "clusters"),
            (topology.cores, "cores"),
            (topology.threads, "threads"),
        )
    )
    pages = f"{guest.hugepage_kib} KiB huge pages" if guest.hugepage_kib else "ordinary pages"
    print()
    output.write_facts(
        [
            (f"guest {guest.index}", guest.hostname),
            ("topology", shape),
            ("emulator", f"QEMU's own threads on {guest.emulator_choice}"),
            ("memory", f"{guest.memory_mib} MiB in {pages}, NUMA binding {guest.memory_binding.value}"),
            *_network(guest, mtu),
            *([("disk", _disk(guest))] if guest.disk_mib else []),
        ]
    )
    print()
    by_number = {cpu.os_cpu: cpu for cpu in case.host.cpus}
    abstract = {os_cpu: number for number, os_cpu in enumerate(case.host.abstract)}
    rows = []
    for pin in guest.pins:
        cpu = by_number[pin.os_cpu]
        numbers = (pin.vcpu, abstract[pin.os_cpu], pin.os_cpu, cpu.core, cpu.socket, cpu.cell, pin.cell)
        rows.append([str(number) for number in numbers])
    head = ("VCPU", "SLURM CPU", "OS CPU", "CORE", "SOCKET", "HOST CELL", "GUEST CELL")
    output.write_table(head, rows, right=head)
    print()
    output.write_table(
        ("GUEST CELL", "VCPUS", "MEMORY MiB", "HOST CELLS"),
        [
            (
                str(c.cell),
                format_cpu_list(c.vcpus),
                str(c.memory_mib),
                format_cpu_list(c.nodeset or (c.host_cell,)),
            )
            for c in guest.cells
        ],
        right=("GUEST CELL", "MEMORY MiB"),
    )
    if guest.devices:
        _show_devices(guest)


def _disk(guest: GuestPlan) -> str:
    place = f", mounted at {guest.disk_mount}" if guest.disk_mount else ""
    return f"{guest.disk_mib} MiB{place}, {guest.paths.disk}"


def _network(guest: GuestPlan, mtu: int) -> list[tuple[str, str]]:
    """The guest's interfaces on the network of its job, and to other networks."""
    nat = [] if guest.nat is None else [("nat", f"{guest.nat.ipv4}, gateway {guest.nat.gateway}, by passt")]
    if guest.site is not None:
        nat.append(("site", f"an address of this node on bridge {guest.site.bridge}"))
    found = guest.interface
    if found is None:
        return nat
    size = f"MTU {mtu}" if mtu else "the underlay's MTU"
    where = f"{found.tap}, {found.mac}, {found.queues} queues, {size}"
    return [("network", f"{found.ipv4} and {found.ipv6} on {where}"), *nat]


def _show_devices(guest: GuestPlan) -> None:
    """Devices with the guest's ports from its root on, if they are in the plan."""
    parents = {controller.index: controller for controller in guest.controllers}
    rows = []
    for device in guest.devices:
        chain, at = [], device.port
        while at in parents:
            chain.append(parents[at])
            at = parents[at].parent
        bus, ports = chain[-1], [c.model.removeprefix("pcie-") for c in chain[-2::-1]]
        where = f"bus {bus.bus_nr} of guest cell {bus.cell}, {', '.join(ports)}"
        rows.append((device.key, device.device_class, device.root_complex, str(device.host_cell), where))
    print()
    output.write_table(("DEVICE", "ROLE", "HOST ROOT", "HOST CELL", "GUEST PORT"), rows, right=("HOST CELL",))
    hole = f", {guest.pcihole64_gib} GiB for their BARs" if guest.pcihole64_gib else ""
    print(f"physical addresses of {guest.address_bits} bits{hole}")


def refusal(case: PlanInput, refused: Refusal, *, as_json: bool) -> None:
    """Print all reasons why there is no plan."""
    if as_json:
        reasons = [{"kind": r.kind, "what": r.what, "why": r.why, "hint": r.hint} for r in refused.reasons]
        output.write_json({"node": case.host.node, "refused": reasons})
        return
    print(f"no guest of image {case.image.ref} can run on {case.host.node}:")
    output.write_table(("FAULT OF", "REASON"), [(r.kind, r.line()) for r in refused.reasons])
