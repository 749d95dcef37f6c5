# SPDX-License-Identifier: Apache-2.0
"""One document about a job: from vhpcd's lease, timelines and reports of nodes.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vhpc_slurm.cli.host import hostview
from vhpc_slurm.cli.jobs import bootline, runs, usagerows
from vhpc_slurm.cli.jobs.runs import Run
from vhpc_slurm.cli.jobs.timeline import natural, stages
from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.fabric import numbers
from vhpc_slurm.hardware import PciFunction
from vhpc_slurm.model import (
    GuestPlacement,
    JobUsage,
    Lease,
    LeaseRecord,
    NodeAllocation,
    NodeReport,
    Timeline,
)
from vhpc_slurm.model.lease import FAILED
from vhpc_slurm.options import OPTIONS

if TYPE_CHECKING:
    from vhpc_slurm.controller.wire_types import ProgressWire

SCHEMA = 1


@dataclass(frozen=True)
class JobReport:
    """A job's last incarnation.

    Attributes:
        record: the lease, with timelines.
        reports: what nodes said, by node; vhpcd keeps those of the first nodes that reported.
        usage: what the programs of the guests used; None: no node has reported it.
        progress: how far the boot is; None: the job does not boot.
        runs: all runs of the job, oldest first.
    """

    record: LeaseRecord
    reports: Mapping[str, NodeReport]
    usage: JobUsage | None = None
    progress: ProgressWire | None = None
    runs: tuple[Run, ...] = ()
    timelines: Mapping[str, Timeline] = field(init=False)

    def __post_init__(self) -> None:
        lines = {line.node: line for line in self.record.timelines}
        ordered = {name: lines[name] for name in sorted(lines, key=natural)}
        object.__setattr__(self, "timelines", ordered)


def make(
    record: LeaseRecord,
    reports: Sequence[NodeReport],
    usage: JobUsage | None = None,
    progress: ProgressWire | None = None,
    every: tuple[Run, ...] = (),
) -> JobReport:
    """The report of a lease; reports of nodes about the job's other runs are left out."""
    own = {one.node: one for one in reports if one.generation == record.lease.generation}
    return JobReport(record, own, usage, progress, every)


def document(found: JobReport) -> dict[str, Any]:
    """The output of ``vhpc report --json``."""
    record, lease = found.record, found.record.lease
    request = lease.request
    return {
        "schema": SCHEMA,
        "job": lease.generation.job_id,
        "restart": lease.generation.restart,
        "generation": str(lease.generation),
        "name": request.job_name,
        "user": request.user,
        "account": request.account or None,
        "partition": request.partition,
        "qos": request.qos or None,
        "image": {"name": str(request.image), "digest": lease.image.digest if lease.image else None},
        "state": bootline.state(lease, found.progress),
        "booting": bootline.document(found.progress),
        "created": record.created,
        "updated": record.updated,
        **{field: getattr(request, field) for one in OPTIONS if one.reported for field in one.fields},
        "from_file": request.from_file,
        "defaults": [{"option": option, "rule": rule} for option, rule in request.defaults],
        "network": _network(lease),
        "nodes": [_node(found, part) for part in lease.allocation.nodes],
        "runs": runs.document(found.runs),
        "lines": [{"from": source, "line": line} for source, line in lines(found)],
        "usage": None if found.usage is None else usagerows.document(found.usage),
    }


def lines(found: JobReport) -> list[tuple[str, str]]:
    """Every line that was said about the job, with the name of who said it; each one once."""
    record = found.record
    refusal = record.lease.refusal
    said = [("vhpcd", refusal)]
    for node in sorted(found.reports, key=natural):
        said += [(node, line) for line in found.reports[node].lines if line != refusal]
    for node, line in found.timelines.items():
        said += [
            (node, f"{stage.name}: {stage.detail}")
            for stage in line.stages
            if stage.detail.startswith(FAILED)
            and (node, stage.detail.removeprefix(FAILED).strip()) not in said
        ]
    said += record.told
    said += [(node, f"not clean: {note}") for node, note in record.unclean]
    return [entry for entry in dict.fromkeys(said) if entry[1]]


def _network(lease: Lease) -> dict[str, Any]:
    identity, segment = lease.network, lease.segment
    return {
        "kind": lease.request.network,
        "fabric": identity.kind,
        "partition_key": None if identity.pkey is None else numbers.label(identity.pkey),
        "vlan": identity.vlan,
        "vni": segment.vni if segment else None,
        "ipv4": segment.ipv4 if segment else None,
        "ipv6": segment.ipv6 if segment else None,
        "encrypted": bool(segment and segment.tunnel_port),
        "nat": lease.nat,
        "site": lease.site,
    }


def _node(found: JobReport, part: NodeAllocation) -> dict[str, Any]:
    report, line = found.reports.get(part.node), found.timelines.get(part.node)
    record = found.record
    functions = {one.address: one for one in report.host.pci} if report and report.host else {}
    return {
        "node": part.node,
        "slurm_cpus": format_cpu_list(part.cpu_ids),
        "memory_mib": part.memory_mib,
        "gres": [{"name": one.name, "type": one.type, "count": one.count} for one in part.gres],
        "taken": part.node in record.taken,
        "released": part.node in record.acknowledged,
        "ready_s": None if line is None else line.ready_s,
        "guests": [_guest(guest, functions) for guest in report.guests] if report else None,
        "stages": None if line is None else stages(line),
    }


def _guest(guest: GuestPlacement, functions: Mapping[str, PciFunction]) -> dict[str, Any]:
    return {
        "index": guest.index,
        "hostname": guest.hostname,
        "os_cpus": list(guest.cpus),
        "cells": [{"cell": cell, "memory_mib": mib} for cell, mib in guest.cells],
        "memory_mib": sum(mib for _, mib in guest.cells),
        "hugepage_kib": guest.hugepage_kib,
        "disk_mib": guest.disk_mib,
        "devices": [_device(address, role, functions.get(address)) for address, role in guest.devices],
    }


def _device(address: str, role: str, function: PciFunction | None) -> dict[str, Any]:
    return {
        "address": address,
        "role": role,
        "kind": hostview.kind(function) if function else None,
        "maker": hostview.maker(function) if function else None,
        "cell": function.cell if function else None,
    }
