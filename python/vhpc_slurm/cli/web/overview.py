# SPDX-License-Identifier: Apache-2.0
"""The first page as one document, which /api/overview shows and the template draws.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from vhpc_slurm.cli import output
from vhpc_slurm.cli.host import hostview
from vhpc_slurm.cli.jobs import bootline, clusters
from vhpc_slurm.cli.jobs.timeline import natural
from vhpc_slurm.cli.web.gathering import Overview
from vhpc_slurm.fabric import numbers
from vhpc_slurm.model import Lease, LeaseRecord, LeaseState

SCHEMA = 1
MAX_ROWS = 500
"""Rows of a table of the page; the JSON has all."""
MAX_COLUMNS = 48
"""Nodes of the matrix of keys on the page."""


def document(found: Overview) -> dict[str, Any]:
    """The document of /api/overview."""
    live = {record.lease.generation: record for record in found.live}
    both = {record.lease.generation: record for record in (*found.newest, *found.live)}
    jobs = sorted(both.values(), key=lambda record: (-record.created, str(record.lease.generation)))
    return {
        "schema": SCHEMA,
        "jobs": [_job(found, record, live=record.lease.generation in live) for record in jobs],
        "clusters": [clusters.document(one) for one in found.clusters],
        "nodes": _nodes(found),
        "devices": sorted(_devices(found), key=lambda one: (natural(one["node"]), one["address"])),
        "operator": found.trouble is not None,
        "quarantine": list(_quarantine(found)),
        "fabric": _fabric(found),
        "jobs_without_devices_yet": found.unread,
        "keys": _keys(found),
        "attention": list(_attention(found)),
    }


def _job(found: Overview, record: LeaseRecord, *, live: bool) -> dict[str, Any]:
    lease = record.lease
    nodes = list(lease.allocation.node_names)
    booting = found.progress.get(str(lease.generation))
    return {
        "job": lease.generation.job_id,
        "generation": str(lease.generation),
        "name": lease.request.job_name,
        "user": lease.request.user,
        "account": lease.request.account or None,
        "partition": lease.request.partition,
        "image": str(lease.request.image),
        "state": bootline.state(lease, booting),
        "live": live,
        "nodes": nodes,
        "node_list": output.node_list(nodes),
        "cluster": lease.cluster and lease.cluster.name,
        "guests_per_node": lease.request.guests_per_node,
        "created": record.created,
        "updated": record.updated,
        "note": record.note or bootline.line(lease.request.guests_per_node, booting),
    }


def _holding(record: LeaseRecord, node: str) -> str:
    """The state of a node's part of a live lease, in the words of the page's legend."""
    if node in dict(record.unclean):
        return "not clean"
    if node in record.acknowledged:
        return "released"
    return "held" if node in record.taken else "not taken"


def _nodes(found: Overview) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for record in found.live:
        if record.lease.state is LeaseState.REFUSED:
            continue
        for part in record.lease.allocation.nodes:
            state = _holding(record, part.node)
            if state == "released":
                continue
            row = rows.setdefault(
                part.node,
                {"node": part.node, "jobs": [], "guests": 0, "cpus": 0, "memory_mib": 0, "gres": {}},
            )
            row["jobs"].append({"job": record.lease.generation.job_id, "state": state})
            row["guests"] += record.lease.request.guests_per_node
            row["cpus"] += len(part.cpu_ids)
            row["memory_mib"] += part.memory_mib
            for gres in part.gres:
                row["gres"][gres.name] = row["gres"].get(gres.name, 0) + gres.count
    return [rows[name] for name in sorted(rows, key=natural)]


def _devices(found: Overview) -> Iterator[dict[str, Any]]:
    for record in found.live:
        for report in found.reports.get(str(record.lease.generation), ()):
            if report.node in record.acknowledged:
                continue
            functions = {one.address: one for one in report.host.pci} if report.host else {}
            for guest in report.guests:
                for address, role in guest.devices:
                    function = functions.get(address)
                    yield {
                        "node": report.node,
                        "address": address,
                        "role": role,
                        "kind": hostview.kind(function) if function else None,
                        "maker": hostview.maker(function) if function else None,
                        "cell": function.cell if function else None,
                        "job": record.lease.generation.job_id,
                        "guest": guest.index,
                    }


def _quarantine(found: Overview) -> Iterator[dict[str, Any]]:
    for reported in found.trouble.quarantine if found.trouble else ():
        for device in reported.devices:
            yield {"node": reported.node} | msgspec.structs.asdict(device)


def _fabric(found: Overview) -> dict[str, Any] | None:
    if found.trouble is None:
        return None
    return msgspec.structs.asdict(found.trouble.fabric)


def _keys(found: Overview) -> dict[str, Any]:
    """Keys of the fabric, VLANs and job networks x nodes."""
    rows: list[dict[str, Any]] = []
    nodes: set[str] = set()
    for record in found.live:
        lease = record.lease
        for kind, label in _labels(lease):
            cells = {node: _holding(record, node) for node in lease.allocation.node_names}
            nodes |= cells.keys()
            rows.append(
                {
                    "key": label,
                    "kind": kind,
                    "job": lease.generation.job_id,
                    "user": lease.request.user,
                    "state": bootline.state(lease, found.progress.get(str(lease.generation))),
                    "left_s": None,
                    "note": "",
                    "nodes": cells,
                }
            )
    live = {record.lease.generation for record in found.live}
    for one in found.resting:
        if one.generation in live:
            continue
        rows.append(
            {
                "key": numbers.label(one.pkey),
                "kind": "VLAN" if numbers.VLANS.has(one.pkey) else "partition key",
                "job": one.generation.job_id,
                "user": "",
                "state": one.state.value,
                "left_s": round(one.left_s),
                "note": one.note,
                "nodes": {},
            }
        )
    rows.sort(key=lambda row: (row["kind"], natural(row["key"]), row["job"]))
    return {"nodes": sorted(nodes, key=natural), "rows": rows}


def _labels(lease: Lease) -> Iterator[tuple[str, str]]:
    identity = lease.network
    if identity.pkey is not None:
        yield "partition key", numbers.label(identity.pkey)
    if identity.vlan is not None:
        yield "VLAN", f"VLAN {identity.vlan}"
    if lease.segment is not None:
        yield "job network", f"VNI {lease.segment.vni}"


def _attention(found: Overview) -> Iterator[dict[str, Any]]:
    """Things that may need an action of an operator."""
    for record in found.live:
        for node, note in record.unclean:
            yield {
                "what": "not released",
                "node": node,
                "job": record.lease.generation.job_id,
                "text": note,
            }
    live = {record.lease.generation for record in found.live}
    for one in found.resting:
        if one.note and one.generation not in live:
            yield {"what": "key in quarantine", "node": None, "job": one.generation.job_id, "text": one.note}
    if (trouble := found.trouble) is None:
        return
    if trouble.fabric.what:
        yield {"what": "fabric", "node": None, "job": None, "text": trouble.fabric.what}
    for device in _quarantine(found):
        text = f"{device['role']} {device['address']}: {device['reason']}"
        yield {"what": "device in quarantine", "node": device["node"], "job": None, "text": text}
    for alarm in trouble.alarms:
        yield {"what": "alarm", "node": alarm.node, "job": alarm.job_id, "text": alarm.what}


def page(whole: dict[str, Any]) -> dict[str, Any]:
    """The values of the template: as many rows and columns as a page can show, and how many are left out."""
    shown = whole["keys"]["nodes"][:MAX_COLUMNS]
    left = {
        name: _left(whole[name])
        for name in ("jobs", "clusters", "nodes", "devices", "quarantine", "attention")
    }
    left |= {"keys": _left(whole["keys"]["rows"]), "columns": len(whole["keys"]["nodes"]) - len(shown)}
    return {
        "jobs": whole["jobs"][:MAX_ROWS],
        "clusters": whole["clusters"][:MAX_ROWS],
        "nodes": whole["nodes"][:MAX_ROWS],
        "devices": whole["devices"][:MAX_ROWS],
        "operator": whole["operator"],
        "quarantine": whole["quarantine"][:MAX_ROWS],
        "fabric": whole["fabric"],
        "attention": whole["attention"][:MAX_ROWS],
        "keys": whole["keys"]["rows"][:MAX_ROWS],
        "columns": shown,
        "unread": whole["jobs_without_devices_yet"],
        "left": left,
    }


def _left(rows: Iterable[object]) -> int:
    return max(0, len(list(rows)) - MAX_ROWS)
