# SPDX-License-Identifier: Apache-2.0
"""vhpc devices: the devices for guests, which generation holds each, and what is in quarantine."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.host.hostview import maker
from vhpc_slurm.cli.options import Json, ThisNode
from vhpc_slurm.cli.verbs import Group, Verb
from vhpc_slurm.config import Config
from vhpc_slurm.device import GpuTraits, is_key, key_order
from vhpc_slurm.errors import UserError
from vhpc_slurm.hardware import UNKNOWN_CELL, PciFunction
from vhpc_slurm.node.devices import assignment as node_devices
from vhpc_slurm.node.devices import gpumap
from vhpc_slurm.node.host import inventory
from vhpc_slurm.node.resource import reservations
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.placement.devices import of_map, places_of, pool
from vhpc_slurm.placement.usage import fold


@dataclass(frozen=True)
class Row:
    """One device.

    Attributes:
        address: its key.
        role: name of its class, such as gpu or vf.
        index: its GRES index; None for VFs, which Slurm only counts.
        state: free, held, quarantined or absent.
        holder: generation that holds it, else empty.
        reason: why it is in quarantine, else empty.
        since: seconds since the epoch, of the quarantine; else None.
    """

    address: str
    role: str
    index: int | None
    state: str
    holder: str
    reason: str
    since: float | None
    driver: str
    group: int | None
    cell: int | None
    what: str


def devices(ctx: typer.Context, node: ThisNode = None, as_json: Json = False) -> int | None:
    """List GPUs and virtual functions of this node for guests (root).

    Shows which generation holds each one, and why one is in quarantine.
    """
    if ctx.invoked_subcommand is not None:
        return None
    config, name = options.config(), context.node_name(node)
    context.need_root("devices")
    rows = _rows(config, name)
    if as_json:
        output.write_json([asdict(row) for row in rows])
        return 0
    if not rows:
        print(f"{name} has no devices for guests (see placement.gpu_map, and vhpc node-setup for VFs)")
        return 0
    output.write_table(
        ("DEVICE", "ROLE", "STATE", "HOLDER", "DRIVER", "GROUP", "CELL", "WHAT", "REASON"),
        [
            (
                row.address,
                row.role if row.index is None else f"{row.role} {row.index}",
                row.state,
                row.holder or "-",
                row.driver or "-",
                "-" if row.group is None else str(row.group),
                "-" if row.cell is None else str(row.cell),
                row.what,
                _why(row),
            )
            for row in rows
        ],
    )
    return 0


def clear(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", show_default=False)], as_json: Json = False
) -> int:
    """Reset, clear and check a device in quarantine; if it passes, jobs may get it again (root)."""
    config = options.config()
    context.need_root("devices clear")
    if not is_key(address):
        raise UserError(
            f"{address[:40]!r} is not the key of a device",
            "write a PCI address like 0000:1b:00.0, or an mdev's UUID",
            "see: vhpc devices",
        )
    layout = Layout(config)
    # no job may get the device during the check
    with reservations.plan_lock(layout, config.guests.stage_timeout_s):
        node_devices.clear(layout, address, fold(reservations.live(layout)).devices)
    if as_json:
        output.write_json({"address": address, "state": "free"})
    else:
        print(f"{address} is clean; jobs may get it again")
    return 0


def _rows(config: Config, node: str) -> list[Row]:
    layout = Layout(config)
    host = inventory.read_inventory(node, config)
    found = node_devices.handed_out(layout)
    held = fold(reservations.live(layout)).devices
    records = node_devices.quarantined(layout)
    types = gpumap.types(Path(config.placement.gpu_map))
    places = places_of(host, found)
    roles = dict.fromkeys(found.gpus, GpuTraits.name)
    known = [*pool(host, found), *(of_map(key, places.get(key), config) for key in found.gpus)]
    roles |= {device.key: device.device_class for device in known if device is not None}
    roles |= {key: record.device_class for key, record in records.items()}

    def row(address: str, role: str, index: int | None) -> Row:
        function, record = places.get(address), records.get(address)
        state = "quarantined" if record else "held" if address in held else "free" if function else "absent"
        return Row(
            address=address,
            role=role,
            index=index,
            state=state,
            holder=held.get(address, ""),
            reason=record.reason if record else "",
            since=record.since if record else None,
            driver=function.driver if function else "",
            group=function.iommu_group if function else None,
            cell=_cell(function),
            what=" ".join(filter(None, (maker(function) if function else "", types.get(address, "")))),
        )

    gpus = [row(key, roles[key], index) for index, key in enumerate(found.gpus)]
    others = sorted(roles.keys() - set(found.gpus), key=key_order)
    return [*gpus, *(row(address, roles[address], None) for address in others)]


def _cell(function: PciFunction | None) -> int | None:
    return None if function is None or function.cell == UNKNOWN_CELL else function.cell


def _why(row: Row) -> str:
    return "" if row.since is None else f"{row.reason}, {output.span(time.time() - row.since)} ago"


GROUP = Group(
    Verb(
        "clear",
        "host.devices:clear",
        "Reset, clear and check a device in quarantine; if it passes, jobs may get it again (root).",
    ),
    callback=devices,
)
