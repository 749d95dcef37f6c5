# SPDX-License-Identifier: Apache-2.0
"""vhpc inventory: the hardware of this node, and on a live node the resources of each guest."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.host import hostview
from vhpc_slurm.cli.options import Json, ThisNode
from vhpc_slurm.config import Config
from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.errors import NodeError, UserError, VhpcError
from vhpc_slurm.hardware import PciFunction, Reservation
from vhpc_slurm.model import HostInventory
from vhpc_slurm.node.devices import mdev, vgpu
from vhpc_slurm.terminal import printable

if TYPE_CHECKING:
    from rich.tree import Tree

SCHEMA = 1


@dataclass(frozen=True)
class Picture:
    """A host with the reservations of guests; ``reservations`` is None if the journals could not be read.

    ``mdev_types`` and ``vgpus`` are what drivers of GPUs offer to guests.
    """

    host: HostInventory
    live: bool
    reservations: tuple[Reservation, ...] | None
    remarks: tuple[str, ...]
    mdev_types: tuple[mdev.MdevType, ...] = ()
    vgpus: tuple[vgpu.VgpuFunction, ...] = ()


def inventory(
    sysfs_root: Annotated[
        str | None,
        typer.Option(
            "--sysfs-root",
            metavar="DIR",
            help="Another machine: a copy of its /sys, with its /proc in the same folder.",
        ),
    ] = None,
    svg: Annotated[
        str | None,
        typer.Option("--svg", metavar="FILE", help="Write a picture to FILE; - is standard output."),
    ] = None,
    node: ThisNode = None,
    as_json: Json = False,
) -> int:
    """Show sockets, cores, caches, NUMA cells, memory and PCI devices; on this node also their holders.

    Only root sees what guests hold.
    """
    if svg == "-" and as_json:
        raise typer.BadParameter("--svg - and --json cannot both write to standard output")
    config, name = options.config(), context.node_name(node)
    root = config.host.sysfs_root if sysfs_root is None else _root(sysfs_root)
    found = _this(config, name) if sysfs_root is None else _other(config, name, root)
    found = dataclasses.replace(found, mdev_types=mdev.offers(root), vgpus=vgpu.functions(root))
    if svg is not None:
        _write_svg(found, svg)
    if as_json:
        output.write_json(as_builtins(found))
    elif svg != "-":
        _show(found)
    return 0


# --- reading ------------------------------------------------------------------------


def _this(config: Config, node: str) -> Picture:
    from vhpc_slurm.node.host import inventory as reader

    host = reader.read_inventory(node, config)
    if not context.is_root():
        return Picture(host, True, None, (*host.remarks, "only root can see the resources of guests"))
    remarks = (*host.remarks, *_libvirt(config, host))
    from vhpc_slurm.node.resource import reservations
    from vhpc_slurm.node.store.layout import Layout

    try:
        return Picture(host, True, reservations.live(Layout(config)), remarks)
    except NodeError as err:
        return Picture(host, True, None, (*remarks, err.line()))


def _libvirt(config: Config, host: HostInventory) -> tuple[str, ...]:
    """Differences from libvirt's view of the host; in a lab several hosts may share one libvirt."""
    from vhpc_slurm.node.guest import capabilities, libvirtd

    try:
        with libvirtd.connect(config.guests.libvirt_uri, config.guests.stage_timeout_s) as hypervisor:
            return capabilities.differences(host, capabilities.parse(hypervisor.capabilities()))
    except (VhpcError, ImportError) as err:
        return (f"libvirt was not compared: {err}",)


def _root(sysfs_root: str) -> str:
    """The sysfs tree that the user has named."""
    folder = Path(sysfs_root)
    root = folder / "sys" if (folder / "sys" / "devices").is_dir() else folder
    if not (root / "devices").is_dir():
        raise UserError(f"--sysfs-root={sysfs_root}", "there is no sysfs tree", "name a copy of /sys")
    return str(root)


def _other(config: Config, node: str, root: str) -> Picture:
    """A tree of another machine, with its procfs if that was captured too."""
    from vhpc_slurm.node.host import inventory as reader

    elsewhere = msgspec.structs.replace(
        config,
        host=msgspec.structs.replace(config.host, sysfs_root=root),
        guests=msgspec.structs.replace(config.guests, accelerator="tcg"),
    )
    host = reader.read_inventory(node, elsewhere, proc_root=Path(root).parent / "proc")
    return Picture(host, False, (), host.remarks)


# --- JSON ---------------------------------------------------------------------------


def as_builtins(found: Picture) -> dict[str, Any]:
    """The document that ``--json`` prints; docs/inventory.md describes it."""
    host = found.host
    return {
        "schema": SCHEMA,
        "node": host.node,
        "live": found.live,
        "arch": host.arch if found.live else None,
        "cpu_vendor": host.cpu_vendor or None,
        "address_bits": host.address_bits or None,
        "kvm": host.kvm if found.live else None,
        "kvm_reason": host.kvm_reason if found.live else None,
        "cpus": [
            {
                "os_cpu": cpu.os_cpu,
                "online": cpu.online,
                "core": cpu.core if cpu.online else None,
                "socket": cpu.socket if cpu.online else None,
                "cell": cpu.cell if cpu.online and cpu.cell >= 0 else None,
            }
            for cpu in host.cpus
        ],
        "slurm_cpus": list(host.abstract),
        "caches": msgspec.to_builtins(host.caches),
        "cells": [
            {
                "cell": cell.cell,
                "memory_mib": cell.memory_mib,
                "gpu": cell.gpu or None,
                "cpus": list(cell.cpus),
                "distances": [{"cell": other, "distance": far} for other, far in cell.distances],
                "hugepages": [
                    {"size_kib": size, "total": total, "free": free} for size, total, free in cell.hugepages
                ],
            }
            for cell in host.cells
        ],
        "pci": [_function(function) for function in host.pci],
        "mdev_types": msgspec.to_builtins(found.mdev_types),
        "vgpus": msgspec.to_builtins(found.vgpus),
        "reservations": None
        if found.reservations is None
        else [_reservation(reservation) for reservation in found.reservations],
        "remarks": list(found.remarks),
    }


def _function(function: PciFunction) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(function)
    return built | {
        "class_code": f"0x{function.class_code:06x}",
        "kind": hostview.kind(function),
        "vendor": f"0x{function.vendor:04x}",
        "device": f"0x{function.device:04x}",
        "driver": function.driver or None,
        "cell": function.cell if function.cell >= 0 else None,
        "switches": list(function.switches),
        "physfn": function.physfn or None,
    }


def _reservation(reservation: Reservation) -> dict[str, Any]:
    # not msgspec: it omits values that convert() filled in from a default
    return dataclasses.asdict(reservation) | {
        "cells": [{"cell": cell if cell >= 0 else None, "memory_mib": mib} for cell, mib in reservation.cells]
    }


# --- the tree -----------------------------------------------------------------------


def _show(found: Picture) -> None:
    from rich.tree import Tree

    view = hostview.arrange(found.host)
    tree = Tree(headline(found))
    for group in view.groups:
        branch = tree.add(group.title)
        for cell in group.cells:
            _show_cell(branch, cell, found.reservations or ())
    if view.offline:
        tree.add(f"offline: CPUs {format_cpu_list(view.offline)}")
    output.show(tree)
    for reservation in found.reservations or ():
        print(f"{hostview.holder(reservation)}: {hostview.describe(reservation)}")
    for line in gpu_part_lines(found):
        print(line)
    if view.hidden:
        print(f"{view.hidden} PCI functions of the platform itself are not shown; --json has them")
    for remark in found.remarks:
        print(f"note: {printable(remark)}")


def headline(found: Picture) -> str:
    """The host in one line."""
    host = found.host
    online = [cpu for cpu in host.cpus if cpu.online]
    counts = (
        (len({cpu.socket for cpu in online}), "socket"),
        (len({cpu.core for cpu in online}), "core"),
        (len(online), "CPU"),
        (len(host.cells), "NUMA cell"),
    )
    parts = [f"{number} {word}{'' if number == 1 else 's'}" for number, word in counts]
    parts.append(hostview.mib(host.memory_mib))
    if host.cpu_vendor:
        parts.append(host.cpu_vendor)
    if found.live:
        parts.append("KVM" if host.kvm else f"no KVM ({host.kvm_reason})")
    return f"{host.node}: {', '.join(parts)}"


def _show_cell(branch: Tree, view: hostview.CellView, reservations: Sequence[Reservation]) -> None:
    if view.cell is None:
        inner = branch.add("without a NUMA cell")
    else:
        whose = f" of GPU {view.cell.gpu}" if view.cell.gpu else ""
        inner = branch.add(f"cell {view.cell.cell}: {hostview.mib(view.cell.memory_mib)}{whose}")
        far = [f"{other}: {value}" for other, value in view.cell.distances if other != view.cell.cell]
        if far:
            inner.add(f"distance to cell {', '.join(far)}")
        pools = [
            f"{free} of {total} free of {hostview.kib(size)}"
            for size, total, free in view.cell.hugepages
            if total
        ]
        if pools:
            inner.add(f"huge pages: {', '.join(pools)}")
    for line in cpu_lines(view):
        inner.add(line)
    held_by = {address: reservation for reservation in reservations for address in reservation.devices}
    for root in view.complexes:
        _show_ports(inner.add(root.name), root.ports, held_by)


def cpu_lines(view: hostview.CellView) -> list[str]:
    """Cores and caches of a cell: cores with the same number of threads in one line, caches by their size."""
    lines = []
    for threads in sorted({len(core) for core in view.cores}, reverse=True):
        alike = [core for core in view.cores if len(core) == threads]
        cores, cpus = [core[0].core for core in alike], [cpu.os_cpu for core in alike for cpu in core]
        each = f" of {threads} threads" if threads > 1 else ""
        count = f"core{'' if len(cores) == 1 else 's'} {format_cpu_list(cores)}"
        lines.append(f"{count}{each}: CPUs {format_cpu_list(cpus)}")
    sizes: dict[tuple[int, str, int], int] = {}
    for cache in view.caches:
        key = (cache.level, {"data": "d", "instruction": "i"}.get(cache.kind, ""), cache.size_kib)
        sizes[key] = sizes.get(key, 0) + 1
    if sizes:
        words = [
            f"{n} x L{level}{which} {hostview.kib(size)}"
            for (level, which, size), n in sorted(sizes.items(), reverse=True)
        ]
        lines.append(f"caches: {', '.join(words)}")
    return lines


def _show_ports(
    branch: Tree, ports: Sequence[hostview.FunctionTree], held_by: dict[str, Reservation]
) -> None:
    for port in ports:
        inner = branch.add(function_line(port.function, held_by.get(port.function.address)))
        for vf in port.vfs:
            inner.add(function_line(vf, held_by.get(vf.address), virtual=True))
        _show_ports(inner, port.below, held_by)


def function_line(function: PciFunction, reservation: Reservation | None, *, virtual: bool = False) -> str:
    """A PCI function in one line; a bridge only with its address and link."""
    parts = [hostview.short(function.address)]
    if function.bridge:
        parts.append("bridge")
    else:
        parts.append("VF" if virtual else f"{hostview.kind(function)}, {hostview.maker(function)}")
        parts += [name for name in function.names if not virtual]
        if function.driver:
            parts.append(f"driver {function.driver}")
        if function.iommu_group is not None:
            parts.append(f"group {function.iommu_group}")
        bars = [bar.size for bar in function.bars if bar.memory]
        if bars and max(bars) >= 1 << 28:
            parts.append(f"BARs {hostview.mib(sum(bars) >> 20)}")
    trained = hostview.link(function.link)
    if trained and not virtual:
        parts.append(trained)
    if reservation is not None:
        parts.append(f"held by {hostview.holder(reservation)}")
    return parts[0] + " " + ", ".join(printable(part) for part in parts[1:])


def gpu_part_lines(found: Picture) -> list[str]:
    """Types of mdevs, and virtual functions that can be vGPUs; alike functions of a GPU in one line."""
    lines = [
        f"{one.parent}: mdev type {one.type} ({one.name or 'no name'}), {len(one.devices)} exist, "
        f"{one.available} more can be created"
        for one in found.mdev_types
    ]
    alike: dict[tuple[str, str, str], list[str]] = {}
    for vf in found.vgpus:
        kinds = ", ".join(f"{kind.name} ({kind.number})" for kind in vf.creatable) or "no type"
        what = f"can become {kinds}" if vf.current == vgpu.NONE else f"vGPU of type {vf.current}"
        alike.setdefault((vf.physfn, vf.current, what), []).append(hostview.short(vf.address))
    lines += [f"{physfn}: VF {', '.join(names)}: {what}" for (physfn, _, what), names in alike.items()]
    return [printable(line) for line in lines]


def _write_svg(found: Picture, target: str) -> None:
    from vhpc_slurm.cli.host import picture

    text = picture.draw(found.host, found.reservations or (), headline(found))
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as err:
        raise UserError(f"cannot write {target}", str(err)) from err
