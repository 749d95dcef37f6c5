# SPDX-License-Identifier: Apache-2.0
"""Allocation + inventory + policy -> ``NodePlan``, or every reason why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vhpc_slurm.architecture import of_machine
from vhpc_slurm.config import Config
from vhpc_slurm.cpulist import parse_cpu_list
from vhpc_slurm.errors import FabricError, NodeError, UserError, VhpcError
from vhpc_slurm.model import (
    GuestPlan,
    HostCpu,
    HostInventory,
    ImageManifest,
    JobRequest,
    MemoryBinding,
    NodePlan,
    VcpuPin,
    guest_hostname,
)
from vhpc_slurm.placement import deadlines, nccl, overhead, pci
from vhpc_slurm.placement.cpu import (
    CpuPlacement,
    EmulatorPlacement,
    choose_cpus,
    numbering_notes,
    place_cpus,
    place_emulator,
    spare_core,
)
from vhpc_slurm.placement.devices import GuestDevices, Wanted, assign, resolve
from vhpc_slurm.placement.hugepages import Backing, back
from vhpc_slurm.placement.input import PlanInput
from vhpc_slurm.placement.memory import MemoryPlacement, bind, size_memory
from vhpc_slurm.placement.split import split_cpus
from vhpc_slurm.record import Record

ROOT_FORMATS = ("erofs", "squashfs", "ext4")  # what a raw, read-only disk may hold


class Refusal(Record, frozen=True):
    """Why there is no plan: all reasons, users' and nodes' alike, in the order found."""

    reasons: tuple[VhpcError, ...]

    def error(self) -> UserError | NodeError | FabricError:
        """The reasons as one error.

        A user's mistake outweighs a node's fault: that job fails on every node,
        and its own user is the only one who can help it.  A node's fault
        outweighs what only has to be waited for.  Only reasons of the kind that
        is raised are in its text.
        """
        users = [reason for reason in self.reasons if isinstance(reason, UserError)]
        if users:
            return UserError(*_merged(users))
        faults = [reason for reason in self.reasons if not isinstance(reason, FabricError)]
        if faults:
            return NodeError(*_merged(faults))
        return FabricError(*_merged(list(self.reasons)))


def _merged(reasons: Sequence[VhpcError]) -> tuple[str, str, str]:
    first = reasons[0]
    if len(reasons) == 1:
        return first.what, first.why, first.hint
    return "; ".join(reason.line() for reason in reasons), "", ""


def fit(what: PlanInput, config: Config) -> NodePlan | Refusal:
    """The placement of one node, or all reasons why there is none; raises nothing."""
    allocation, request, host = what.allocation, what.request, what.host
    reasons = _image_errors(what.image.manifest, host, config)
    chosen = choose_cpus(what, reasons, whole_cores=config.placement.cores == "strict")
    notes: list[str] = []
    cpus: list[_GuestCpus] = []
    if chosen:
        parts, notes = split_cpus(chosen, request.guests_per_node, reasons)
        cpus = _place_cpus(parts, host, config, reasons)
        reasons += _cpu_errors(cpus, what.image.manifest, host)
    wanted = Wanted()
    if what.devices is not None:
        wanted = resolve(allocation, request, host, what.devices, config, what.usage, reasons)
    size = size_memory(allocation, request, config.guests.memory_reserve_mib, reasons)
    if size is not None:
        needed = overhead.outside_mib(size.guests_mib, len(chosen), wanted, request, config)
        given = bool(wanted.gpus or wanted.vfs)
        size = overhead.cover(size, needed, allocation, request, reasons, devices=given)
    if size is None:
        return Refusal(tuple(reasons))
    # without CPUs there are no cells to choose, but memory is still judged
    shapes = [guest.vcpus for guest in cpus] or [host.cpus[:1]]
    backing = back(shapes, size, what, config, reasons)
    if reasons or not cpus or backing is None:
        return Refusal(tuple(reasons))
    guests, more = _guests(chosen, cpus, wanted, backing, what, config, reasons)
    if reasons:
        return Refusal(tuple(reasons))
    return NodePlan(
        generation=what.generation,
        node=host.node,
        guests=tuple(guests),
        job_memory_mib=allocation.memory_mib,
        reserve_mib=size.reserve_mib,
        notes=tuple(dict.fromkeys([*notes, *size.notes, *more])),
    )


class _GuestCpus(Record, frozen=True):
    """The CPUs of one guest: the host's in the order of its vCPUs, their placement, QEMU's own."""

    vcpus: tuple[HostCpu, ...]
    placement: CpuPlacement
    emulator: EmulatorPlacement


def _place_cpus(
    parts: Sequence[tuple[HostCpu, ...]], host: HostInventory, config: Config, reasons: list[VhpcError]
) -> list[_GuestCpus]:
    try:
        configured = parse_cpu_list(config.host.emulator_cpus)
    except ValueError as err:
        reasons.append(NodeError("host.emulator_cpus is not valid", str(err), "write it like 0-1,64-65"))
        return []
    found = []
    for part in parts:
        vcpus, spare = spare_core(part) if config.placement.emulator_core and not configured else (part, ())
        placement = place_cpus(vcpus, host)
        emulator = place_emulator(configured, placement.os_cpus, spare, host, reasons)
        if emulator is not None:
            found.append(_GuestCpus(vcpus, placement, emulator))
    return found


def _guests(
    chosen: Sequence[HostCpu],
    cpus: Sequence[_GuestCpus],
    wanted: Wanted,
    backing: Backing,
    what: PlanInput,
    config: Config,
    reasons: list[VhpcError],
) -> tuple[list[GuestPlan], list[str]]:
    """All guests of the node on the chosen CPUs, except those with reasons against them, and notes."""
    strict, host = config.placement.devices == "strict", what.host
    given, device_notes = assign([guest.vcpus for guest in cpus], wanted, host, reasons, strict=strict)
    memory = bind(backing.guests, {cpu.os_cpu for cpu in chosen}, host, hugepages=backing.page_kib > 0)
    reasons += _loose(memory, config, host)
    guests = []
    for index, (guest, cells, own) in enumerate(zip(cpus, memory, given, strict=True)):
        built = _guest(index, guest, cells, own, backing.page_kib, what, reasons)
        if built is not None:
            guests.append(_timed(built, host, what.request, config))
    notes = [note for guest in cpus for note in guest.placement.notes]
    notes += [*numbering_notes(host), *backing.notes, *(note for m in memory for note in m.notes)]
    notes += device_notes
    notes += [
        f"guest {guest.index} of {host.node} does not see how near its devices are: a file tells NCCL"
        for guest in guests
        if guest.nccl_topology
    ]
    return guests, notes


def _timed(guest: GuestPlan, host: HostInventory, request: JobRequest, config: Config) -> GuestPlan:
    """The guest with what follows from its place: deadlines, and the file for NCCL."""
    return replace(
        guest,
        start_timeout_s=deadlines.start_s(config.guests, guest),
        boot_timeout_s=deadlines.boot_s(config.guests, request.timeout_s, guest),
        nccl_topology=nccl.topology(guest, host),
    )


def _guest(
    index: int,
    cpus: _GuestCpus,
    memory: MemoryPlacement,
    given: GuestDevices,
    page_kib: int,
    what: PlanInput,
    reasons: list[VhpcError],
) -> GuestPlan | None:
    """One guest; None if it cannot be made. With reasons against it, it is not valid."""
    host = what.host
    cell_of = {vcpu: cell.cell for cell in memory.cells for vcpu in cell.vcpus}
    layout = pci.lay_out(given.all, lambda cell: _guest_cell(cell, memory, host), reasons)
    arch = of_machine(what.image.manifest.arch)
    hole = pci.hole_bytes(given.all, arch)
    if given.all:
        reasons += pci.check_bits(memory.memory_mib, hole, host, arch)
    if layout is None:
        return None
    return GuestPlan(
        index=index,
        hostname=guest_hostname(host.node, index, what.request.guests_per_node),
        pins=tuple(VcpuPin(pin.vcpu, pin.os_cpu, cell_of[pin.vcpu]) for pin in cpus.placement.pins),
        topology=cpus.placement.topology,
        cells=memory.cells,
        memory_mib=memory.memory_mib,
        emulator_cpus=cpus.emulator.cpus,
        emulator_choice=cpus.emulator.choice,
        hugepage_kib=page_kib,
        memory_binding=memory.binding,
        devices=layout.devices,
        controllers=layout.controllers,
        pcihole64_gib=hole >> 30,
        address_bits=pci.address_bits(memory.memory_mib, hole, arch) if given.all else 0,
    )


def _guest_cell(number: int, memory: MemoryPlacement, host: HostInventory) -> int:
    """The guest cell of a host cell, or of the nearest host cell in use."""
    far = next((dict(cell.distances) for cell in host.cells if cell.cell == number), {})
    near = min(
        memory.cells,
        key=lambda cell: (cell.host_cell != number, far.get(cell.host_cell, 1 << 16), cell.cell),
    )
    return near.cell


def _loose(memory: Sequence[MemoryPlacement], config: Config, host: HostInventory) -> list[VhpcError]:
    """With memory = strict: an error where memory is only preferred."""
    loose = [m for m in memory if m.binding is not MemoryBinding.STRICT]
    if config.placement.memory != "strict" or not loose:
        return []
    cells = sorted({cell.host_cell for m in loose for cell in m.cells})
    return [
        UserError(
            f"memory on {host.node} cannot be bound to NUMA cell {', '.join(map(str, cells))} for certain",
            "others may use it, or it is too small, and the site wants it bound",
            "ask for whole sockets or --exclusive, and for no more memory than they have",
        )
    ]


def _cpu_errors(
    guests: Sequence[_GuestCpus], manifest: ImageManifest, host: HostInventory
) -> list[VhpcError]:
    """An error if the smallest guest has too few CPUs for the image."""
    least = min((len(guest.vcpus) for guest in guests), default=manifest.min_cpus)
    if least >= manifest.min_cpus:
        return []
    hint = "ask for more, such as --cpus-per-task" + (", or for fewer guests" if len(guests) > 1 else "")
    what = f"image {manifest.name}:{manifest.tag} needs {manifest.min_cpus} CPUs, a guest on {host.node} has"
    return [UserError(f"{what} {least}", "", hint)]


def _image_errors(manifest: ImageManifest, host: HostInventory, config: Config) -> list[VhpcError]:
    errors: list[VhpcError] = []
    image = f"image {manifest.name}:{manifest.tag}"
    if manifest.arch not in (host.arch, *config.guests.emulated):
        errors.append(UserError(f"{image} is for {manifest.arch}, {host.node} is {host.arch}"))
    if manifest.root_format not in ROOT_FORMATS:
        errors.append(
            UserError(
                f"{image} has a root of format {manifest.root_format!r}",
                f"guests boot {', '.join(ROOT_FORMATS)}",
                "rebuild the image",
            )
        )
    return errors
