# SPDX-License-Identifier: Apache-2.0
"""vhpc ps: generations from vhpcd, or guests from this node's journals."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vhpc_slurm.cli import context, leases, options, output
from vhpc_slurm.cli.jobs import bootline, usagerows
from vhpc_slurm.cli.options import Json
from vhpc_slurm.config import Config
from vhpc_slurm.model import LeaseRecord
from vhpc_slurm.terminal import short_digests

if TYPE_CHECKING:
    from vhpc_slurm.controller.api.usage_messages import UsedWire
    from vhpc_slurm.controller.wire_types import ProgressWire

USED = ("CPU", "PEAK", "FIGURES")
"""CPU time of all programs, the sum of the guests' memory peaks, and whether that is all or so far."""


def ps(
    everything: Annotated[bool, typer.Option("--all", help="Also generations that have ended.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Guests of this node, from its journals.")] = False,
    as_json: Json = False,
) -> int:
    """List your jobs with guests (root: all), from vhpcd, or from this node's journals (root)."""
    if local and everything:
        raise typer.BadParameter("--all and --local exclude each other")
    if local:
        return _ps_local(options.config(), as_json=as_json)
    page = leases.client(options.config()).history(live=not everything)
    chosen = [record.unpack() for record in page.records]
    progress = {one.generation: one for one in page.progress}
    used = {one.generation: one for one in page.used}
    if as_json:
        output.write_json([_record_json(record, progress, used) for record in chosen])
        return 0
    now = time.time()
    in_clusters = any(record.lease.cluster for record in chosen)
    rows = [_record_row(record, progress, used, now, clusters=in_clusters) for record in chosen]
    head: tuple[str, ...] = (
        "JOB",
        "GENERATION",
        "USER",
        "IMAGE",
        "STATE",
        "NODES",
        "HELD ON",
        "AGE",
        *USED,
        "NOTE",
    )
    if in_clusters:
        head = (*head[:4], "CLUSTER", *head[4:])
    output.write_table(head, rows, right=("JOB", "AGE", *USED[:2]))
    return 0


def _used_cells(used: UsedWire | None) -> tuple[str, ...]:
    if used is None:
        return (usagerows.UNKNOWN,) * len(USED)
    of_when = "in all" if used.so_far_s is None else usagerows.so_far_text(used.so_far_s)
    return usagerows.time_text(used.cpu_us), usagerows.size_text(used.peak_bytes), of_when


def _nodes(record: LeaseRecord) -> list[str]:
    return [part.node for part in record.lease.allocation.nodes]


def _holders(record: LeaseRecord) -> list[str]:
    """Nodes that have not confirmed that they released everything of the generation."""
    return [node for node in record.taken if node not in record.acknowledged]


def _record_row(
    record: LeaseRecord,
    progress: Mapping[str, ProgressWire],
    used: Mapping[str, UsedWire],
    now: float,
    *,
    clusters: bool,
) -> tuple[str, ...]:
    """The cells of a job; ``clusters``: also its cluster."""
    lease = record.lease
    booting = progress.get(str(lease.generation))
    return (
        str(lease.generation.job_id),
        str(lease.generation),
        lease.request.user,
        short_digests(str(lease.request.image)),
        *([lease.cluster.name if lease.cluster else "-"] if clusters else []),
        bootline.state(lease, booting),
        output.node_list(_nodes(record)),
        output.node_list(_holders(record)) or "-",
        output.span(now - record.created),
        *_used_cells(used.get(str(lease.generation))),
        record.note or bootline.line(lease.request.guests_per_node, booting),
    )


def _record_json(
    record: LeaseRecord, progress: Mapping[str, ProgressWire], all_used: Mapping[str, UsedWire]
) -> dict[str, Any]:
    lease = record.lease
    used = all_used.get(str(lease.generation))
    booting = progress.get(str(lease.generation))
    return {
        "job": lease.generation.job_id,
        "restart": lease.generation.restart,
        "generation": str(lease.generation),
        "user": lease.request.user,
        "uid": lease.request.uid,
        "image": str(lease.request.image),
        "digest": lease.image.digest if lease.image else None,
        "state": bootline.state(lease, booting),
        "refusal": lease.refusal or None,
        "defaults": dict(lease.request.defaults),
        "nodes": _nodes(record),
        "taken": list(record.taken),
        "acknowledged": list(record.acknowledged),
        "unclean": dict(record.unclean),
        "told": dict(record.told),
        "network": lease.network.kind,
        "cluster": lease.cluster and lease.cluster.name,
        "vni": lease.segment.vni if lease.segment else None,
        "booting": bootline.document(booting),
        "usage": used
        and {
            "cpu_us": used.cpu_us,
            "peak_bytes": used.peak_bytes,
            "so_far": None if used.so_far_s is None else {"age_s": round(used.so_far_s, 1)},
        },
        "created": record.created,
        "updated": record.updated,
    }


def _ps_local(config: Config, *, as_json: bool) -> int:
    """Show guests of this node from its journals, and whether each domain runs."""
    context.need_root("ps --local")
    guests = _local_guests(config)
    if as_json:
        output.write_json(guests)
        return 0
    output.write_table(
        ("JOB", "GENERATION", "GUEST", "IMAGE", "STATUS", "DOMAIN", "RUNS"),
        [
            (
                str(guest["job"] or "-"),
                guest["generation"] or "-",
                str(guest["guest"]),
                short_digests(guest["image"] or "-"),
                guest["status"],
                guest["domain"],
                "yes" if guest["runs"] else "no",
            )
            for guest in guests
        ],
        right=("JOB", "GUEST"),
    )
    return 0


def _local_guests(config: Config) -> list[dict[str, Any]]:
    from vhpc_slurm.node.guest import libvirtd
    from vhpc_slurm.node.store import journal, statefile
    from vhpc_slurm.node.store.layout import Layout, domain_name

    layout = Layout(config)
    with libvirtd.connect(config.guests.libvirt_uri, config.guests.stage_timeout_s) as hypervisor:
        running = set(hypervisor.names())
    found = []
    for generation in journal.generations(layout.journals):
        state = statefile.read_state(layout.state_file(generation.job_id))
        if state.get("generation") != str(generation):
            state = {}  # the run folder belongs to another incarnation
        folders = layout.job(generation.job_id).glob("g[0-9]*") if state else ()
        indexes = {int(path.name[1:]) for path in folders if path.name[1:].isdigit()}
        indexes |= set(_indexes(running, domain_name(generation, 0)))
        for index in sorted(indexes or {0}):
            name = domain_name(generation, index)
            found.append(
                {
                    "job": generation.job_id,
                    "generation": str(generation),
                    "guest": index,
                    "image": state.get("image"),
                    "status": state.get("status", "unknown"),
                    "domain": name,
                    "runs": name in running,
                }
            )
    known = {entry["domain"] for entry in found}
    return found + [_orphan(name) for name in sorted(running - known)]


def _indexes(running: Iterable[str], first: str) -> Iterable[int]:
    """Guest indexes of a generation among names of domains; ``first`` is the name of its guest 0."""
    stem = first.removesuffix("0")
    for name in running:
        if name.startswith(stem) and name.removeprefix(stem).isdigit():
            yield int(name.removeprefix(stem))


def _orphan(name: str) -> dict[str, Any]:
    """A domain of vhpc without a journal; `vhpc reconcile` ends it."""
    return {
        "job": None,
        "generation": None,
        "guest": 0,
        "image": None,
        "status": "orphan",
        "domain": name,
        "runs": True,
    }
