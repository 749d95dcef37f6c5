# SPDX-License-Identifier: Apache-2.0
"""Choice of a job's GPUs and virtual functions, and their assignment to its guests."""

from __future__ import annotations

from collections.abc import Sequence

from vhpc_slurm.config import Config
from vhpc_slurm.device import HostDevice, NodeDevices, classify, key_order
from vhpc_slurm.errors import FabricError, NodeError, UserError, VhpcError
from vhpc_slurm.hardware import UNKNOWN_CELL, PciFunction
from vhpc_slurm.model import HostCpu, HostInventory, JobRequest, NodeAllocation
from vhpc_slurm.placement.split import share
from vhpc_slurm.placement.usage import Usage
from vhpc_slurm.record import Record

SAME_COMPLEX, SAME_CELL = range(2)
"""Distances of devices that share no switch; those that share one are below, those of cells above."""
NOWHERE_NEAR = 1 << 16


class Wanted(Record, frozen=True):
    """GPUs in the order of their GRES indexes, candidate virtual functions, and how many of them."""

    gpus: tuple[HostDevice, ...] = ()
    pool: tuple[HostDevice, ...] = ()
    vfs: int = 0


class GuestDevices(Record, frozen=True):
    """Devices of one guest."""

    gpus: tuple[HostDevice, ...] = ()
    vfs: tuple[HostDevice, ...] = ()

    @property
    def all(self) -> tuple[HostDevice, ...]:
        """GPUs first, so that the guest numbers them in the order of their indexes."""
        return (*self.gpus, *self.vfs)


def resolve(
    allocation: NodeAllocation,
    request: JobRequest,
    host: HostInventory,
    devices: NodeDevices,
    config: Config,
    usage: Usage,
    reasons: list[VhpcError],
) -> Wanted:
    """Map generic resources to devices that exist, are usable, and are held by no other job.

    With a reason against them, which is added to ``reasons``, the devices are not valid.
    """
    places = places_of(host, devices)
    gpus: list[HostDevice] = []
    for key in _gpu_keys(allocation, host, devices, config, reasons):
        place = places.get(key)
        found = of_map(key, place, config)
        if found is None:
            what = "not a PCI function" if place is None else f"of class {place.class_code:06x}, not a GPU"
            reasons.append(
                NodeError(
                    f"the GPU map of {host.node} names {key}",
                    f"it is {what}",
                    "compare it with lspci -D",
                )
            )
            continue
        reasons += _unusable(found, host, devices, usage)
        gpus.append(found)
    there = pool(host, devices)
    count = _vf_count(allocation, request, len(there), config, host, reasons)
    free = tuple(vf for vf in there if not _unusable(vf, host, devices, usage))
    if count > len(free):
        reasons.append(_too_few(count, there, free, host, usage, counted=_counted(allocation, config) > 0))
    return Wanted(tuple(gpus), free, count)


def places_of(host: HostInventory, devices: NodeDevices) -> dict[str, PciFunction]:
    """The place of each device of a node by its key: the PCI function that it is, or that has it."""
    functions = {function.address: function for function in host.pci}
    owned = {key: functions[parent] for key, parent in devices.parents if parent in functions}
    return functions | owned


def of_map(key: str, place: PciFunction | None, config: Config) -> HostDevice | None:
    """The device of a line of the GPU map; None if its place does not exist, or no class owns it."""
    if place is None:
        return None
    return classify(key, place, indexed=True, allowed=is_allowed(place, config))


def is_allowed(function: PciFunction, config: Config) -> bool:
    """Whether the site allows functions of this kind, whatever their class."""
    return f"{function.vendor:04x}:{function.device:04x}" in config.devices.allow


def _gpu_keys(
    allocation: NodeAllocation,
    host: HostInventory,
    devices: NodeDevices,
    config: Config,
    reasons: list[VhpcError],
) -> list[str]:
    found: list[str] = []
    for gres in allocation.gres:
        if gres.name != config.placement.gpu_gres:
            continue
        if len(gres.indexes) != gres.count:
            reasons.append(
                NodeError(
                    f"Slurm allocated {gres.count} GPUs on {host.node} and named {len(gres.indexes)} of them",
                    "guests get exactly the GPUs that Slurm names",
                    "set File= for each GPU in gres.conf",
                )
            )
        for index in gres.indexes:
            if 0 <= index < len(devices.gpus):
                found.append(devices.gpus[index])
            else:
                reasons.append(
                    NodeError(
                        f"Slurm allocated GPU {index} on {host.node}",
                        f"the GPU map has {len(devices.gpus)} entries",
                        "make the map agree with gres.conf",
                    )
                )
    twice = sorted({address for address in found if found.count(address) > 1})
    if twice:
        reasons.append(
            NodeError(
                f"GPU {', '.join(twice)} of {host.node} would be allocated twice", "", "correct the GPU map"
            )
        )
    return found


def _unusable(device: HostDevice, host: HostInventory, devices: NodeDevices, usage: Usage) -> list[VhpcError]:
    what = f"device {device.key} of {host.node}"
    if device.key in usage.devices:
        return [FabricError(f"{what} is held by a guest of {usage.devices[device.key]}")]
    if device.key in devices.quarantined:
        return [NodeError(f"{what} is quarantined", "", "see: vhpc devices")]
    if device.traits.iommu and device.place.iommu_group is None:
        return [
            NodeError(
                f"{what} has no IOMMU group",
                "the IOMMU is off, so a guest could write to all of the host's memory",
                "boot with intel_iommu=on or amd_iommu=on, and enable it in the firmware",
            )
        ]
    return []


def pool(host: HostInventory, devices: NodeDevices) -> tuple[HostDevice, ...]:
    """Devices that jobs get by number: virtual functions."""
    found = (classify(key, place, indexed=False) for key, place in places_of(host, devices).items())
    return tuple(device for device in found if device is not None)


def _counted(allocation: NodeAllocation, config: Config) -> int:
    """How many virtual functions Slurm has allocated to the job here; 0 if it does not count them."""
    return sum(gres.count for gres in allocation.gres if gres.name == config.placement.vf_gres)


def _too_few(
    count: int,
    there: tuple[HostDevice, ...],
    free: tuple[HostDevice, ...],
    host: HostInventory,
    usage: Usage,
    *,
    counted: bool,
) -> VhpcError:
    """The error for too few virtual functions: the node's fault if Slurm has counted them.

    Otherwise a later attempt may succeed, or the node does not have enough usable ones.
    """
    held = sum(vf.key in usage.devices for vf in there)
    what = f"the job needs {count} virtual functions on {host.node}, {len(free)} are free"
    why = f"of {len(there)}, {held} are held by other jobs, {len(there) - held - len(free)} cannot be used"
    if counted:
        return NodeError(what, why, "correct their number in gres.conf; see: vhpc inventory")
    kind = FabricError if count <= len(free) + held else UserError
    return kind(what, why, "Slurm does not count them here")


def _vf_count(
    allocation: NodeAllocation,
    request: JobRequest,
    there: int,
    config: Config,
    host: HostInventory,
    reasons: list[VhpcError],
) -> int:
    """How many: Slurm's allocation, or the user's request if Slurm does not count them; 0 with a reason."""
    name = config.placement.vf_gres
    allocated = _counted(allocation, config)
    asked = request.vfs
    if asked is None:
        return allocated
    if asked < 0:
        reasons.append(UserError(f"--vhpc-vfs={asked} is negative"))
    elif allocated and asked > allocated:
        hint = f"request --gres={name}:{asked}"
        reasons.append(UserError(f"--vhpc-vfs={asked} is more than Slurm allocated: {allocated}", "", hint))
    elif asked > there:
        why = f"{host.node} has {there} in all"
        reasons.append(UserError(f"--vhpc-vfs={asked} is more than a node has", why, "request fewer"))
    else:
        return asked
    return 0


# --- assignment ---------------------------------------------------------------------


def assign(
    parts: Sequence[Sequence[HostCpu]],
    wanted: Wanted,
    host: HostInventory,
    reasons: list[VhpcError],
    *,
    strict: bool,
) -> tuple[list[GuestDevices], list[str]]:
    """Assign the job's devices to its guests, the nearest first.

    Args:
        parts: CPUs of each guest.
        wanted: the job's devices on this node.
        host: for distances.
        reasons: reasons against the plan are added.
        strict: a device that is at none of its guest's cells is a reason.

    Returns:
        Devices by guest, and notes.
    """
    near = _Near(host)
    cells = [{cpu.cell for cpu in part} for part in parts]
    gpus = _deal(cells, wanted.gpus, near)
    vfs: list[list[HostDevice]] = [[] for _ in parts]
    left: dict[str, list[HostDevice]] = {}  # by physical function: its virtual functions are interchangeable
    for vf in sorted(wanted.pool, key=lambda vf: key_order(vf.key), reverse=True):
        left.setdefault(_adapter(vf), []).append(vf)
    order = {pf: -place for place, pf in enumerate(left)}
    quota = share(wanted.vfs, [1] * len(parts))
    taken: dict[str, int] = {}
    for turn in range(max(quota, default=0)):
        for guest in (guest for guest in range(len(parts)) if turn < quota[guest]):
            own = near.unserved(gpus[guest], vfs[guest]) or gpus[guest][turn % max(1, len(gpus[guest])) :][:1]
            pf = min(
                left,
                key=lambda pf: (
                    near.closeness(left[pf][-1], own, cells[guest]),
                    taken.get(pf, 0),
                    order[pf],
                ),
            )
            vfs[guest].append(left[pf].pop())
            taken[pf] = taken.get(pf, 0) + 1
            if not left[pf]:
                del left[pf]
    found = [GuestDevices(tuple(g), tuple(v)) for g, v in zip(gpus, vfs, strict=True)]
    notes = [
        f"{count} {what} on {len(parts)} guests: some have one more than others"
        for count, what in ((len(wanted.gpus), "GPUs"), (wanted.vfs, "virtual functions"))
        if count % len(parts)
    ]
    return found, notes + _remote(found, cells, host, reasons, strict=strict)


def _adapter(device: HostDevice) -> str:
    """Address of the physical function that the device is a part of."""
    return device.place.physfn or device.place.address


class _Near:
    """Distances between devices and to cells; smaller is nearer."""

    def __init__(self, host: HostInventory) -> None:
        self._far = {cell.cell: dict(cell.distances) for cell in host.cells}
        self._pairs: dict[tuple[str, str], int] = {}

    def cell(self, function: PciFunction, cells: set[int]) -> int:
        """Distance to the nearest of some cells."""
        if function.cell == UNKNOWN_CELL:
            return NOWHERE_NEAR
        if function.cell in cells:
            return SAME_CELL
        return min(
            (self._far.get(c, {}).get(function.cell, NOWHERE_NEAR) for c in cells), default=NOWHERE_NEAR
        )

    def closeness(self, vf: HostDevice, gpus: Sequence[HostDevice], cells: set[int]) -> int:
        """Distance to a guest's GPUs by switch, root complex, cell; without GPUs, to its cells."""
        if not gpus:
            return self.cell(vf.place, cells)
        return min(self._pair(vf, gpu) for gpu in gpus)

    def _pair(self, vf: HostDevice, gpu: HostDevice) -> int:
        key = (_adapter(vf), gpu.key)
        if key not in self._pairs:
            self._pairs[key] = self._apart(vf.place, gpu.place)
        return self._pairs[key]

    def unserved(self, gpus: Sequence[HostDevice], vfs: Sequence[HostDevice]) -> list[HostDevice]:
        """The first GPU that shares no root complex with any of these VFs; empty if all do."""
        served = {vf.place.root_complex for vf in vfs}
        return [gpu for gpu in gpus if gpu.place.root_complex not in served][:1]

    def _apart(self, adapter: PciFunction, gpu: PciFunction) -> int:
        if not adapter.root_complex or adapter.root_complex != gpu.root_complex:
            return self.cell(adapter, {gpu.cell})
        # some GPUs have a switch of their own, others share several with an adapter
        shared = len({*adapter.switches} & {*gpu.switches})
        return SAME_COMPLEX - 2 * shared + (0 < shared < len(adapter.switches))


def _deal(cells: Sequence[set[int]], gpus: Sequence[HostDevice], near: _Near) -> list[list[HostDevice]]:
    """Divide GPUs equally, each to the nearest guest that still needs one; by their indexes."""
    quota = share(len(gpus), [1] * len(cells))
    dealt: list[list[int]] = [[] for _ in cells]
    pairs = sorted(
        (near.cell(gpu.place, where), guest, index)
        for guest, where in enumerate(cells)
        for index, gpu in enumerate(gpus)
    )
    given: set[int] = set()
    for _, guest, index in pairs:
        if index not in given and len(dealt[guest]) < quota[guest]:
            dealt[guest].append(index)
            given.add(index)
    return [[gpus[index] for index in sorted(part)] for part in dealt]


def _remote(
    found: Sequence[GuestDevices],
    cells: Sequence[set[int]],
    host: HostInventory,
    reasons: list[VhpcError],
    *,
    strict: bool,
) -> list[str]:
    """Notes on devices that are at none of their guest's cells; reasons against the plan if it is strict."""
    lines = [
        f"device {device.key} is at NUMA cell {device.place.cell}, guest {guest} of {host.node} runs in "
        + ", ".join(map(str, sorted(cells[guest])))
        for guest, devices in enumerate(found)
        for device in devices.all
        if device.place.cell != UNKNOWN_CELL and device.place.cell not in cells[guest]
    ]
    if not strict:
        return lines
    hint = "request --gres-flags=enforce-binding, and set Cores= for GPUs in gres.conf"
    reasons += [UserError(line, "placement.devices is strict", hint) for line in lines]
    return []
