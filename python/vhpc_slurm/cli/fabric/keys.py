# SPDX-License-Identifier: Apache-2.0
"""vhpc fabric ls, show, fence, clear, audit: partition keys from vhpcd's database."""

from __future__ import annotations

import re
import sys
import time
from typing import Annotated, Any

import typer

from vhpc_slurm.cli import options, output
from vhpc_slurm.cli.options import Json
from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.store.choice import read_keys
from vhpc_slurm.errors import UserError
from vhpc_slurm.fabric import keys, numbers
from vhpc_slurm.fabric.select import backend
from vhpc_slurm.model import Generation, LeaseRecord
from vhpc_slurm.terminal import printable

AGAIN_S = 1.0
"""Pause between two audits: vhpcd may be changing the fabric during the first."""

KeyOrJob = Annotated[
    str,
    typer.Argument(
        metavar="KEY|JOB",
        help="A key (0x1000, vlan100), a job id, or a generation.",
        show_default=False,
    ),
]


def ls(as_json: Json = False) -> int:
    """List the partition keys that are not free, with job and state (root, on vhpcd's host)."""
    snapshot = read_keys(options.config())
    if as_json:
        assignments = [_fields(one) for one in snapshot.assignments]
        output.write_json({"epoch": snapshot.epoch, "assignments": assignments})
        return 0
    rows = []
    for one in snapshot.assignments:
        ports = str(one.ranks * one.rails * one.vfs)
        rows.append(
            (numbers.label(one.pkey), one.state.value, str(one.generation), one.owner, ports, _note(one))
        )
    output.write_table(("PKEY", "STATE", "GENERATION", "OWNER", "PORTS", "NOTE"), rows, right=("PORTS",))
    return 0


def _fields(assignment: keys.KeyAssignment) -> dict[str, Any]:
    return {
        "pkey": numbers.label(assignment.pkey),
        "state": assignment.state,
        "generation": str(assignment.generation),
        "owner": assignment.owner,
        "first_rank": assignment.first_rank,
        "ranks": assignment.ranks,
        "rails": assignment.rails,
        "vfs": assignment.vfs,
        "left_s": assignment.left_s,
        "note": assignment.note,
    }


def _note(assignment: keys.KeyAssignment) -> str:
    resting = assignment.state is keys.KeyState.QUARANTINE
    return assignment.note or (f"for {output.span(assignment.left_s)}" if resting else "")


def show(what: KeyOrJob, as_json: Json = False) -> int:
    """Show which job has a key: lease, nodes and their last report, ports (root, on vhpcd's host)."""
    config = options.config()
    assignments = _chosen(config, what)
    records = {
        record.lease.generation: record
        for job_id in sorted({assignment.generation.job_id for assignment in assignments})
        for record in ControllerClient(config).leases(job_id=job_id, timelines=False)
    }
    found = [_whole(assignment, records.get(assignment.generation)) for assignment in assignments]
    if as_json:
        output.write_json({"assignments": found})
        return 0
    for one in found:
        print(f"{one['pkey']} {one['state']} {one['generation']} of {one['owner']}")
        print(f"  lease   {one['lease'] or 'deleted'}")
        if one["note"] or one["left_s"]:
            print(f"  why     {printable(one['note']) or 'in quarantine for ' + output.span(one['left_s'])}")
        for node in one["nodes"]:
            said = node["said"] + (f": {printable(node['note'])}" if node["note"] else "")
            print(f"  node    {node['node']}  {said}")
        for guid in one["port_guids"]:
            print(f"  port    {guid}")
    return 0


def _chosen(config: Config, what: str) -> list[keys.KeyAssignment]:
    """Assignments of a key (0x1000, vlan100), a job or a generation; UserError without one."""
    snapshot = read_keys(config)
    segment = re.fullmatch(r"vlan ?([0-9]{1,8})", what.lower(), re.ASCII)
    if re.fullmatch(r"0x[0-9a-fA-F]{1,4}", what, re.ASCII):
        found = [one for one in snapshot.assignments if one.pkey == int(what, 16) & ~numbers.FULL]
    elif segment is not None:
        space = numbers.VLANS
        found = [
            one
            for one in snapshot.assignments
            if one.pkey == space.base + int(segment[1]) and space.has(one.pkey)
        ]
    elif re.fullmatch(r"[0-9]{1,10}", what, re.ASCII):
        found = [one for one in snapshot.assignments if one.generation.job_id == int(what)]
    else:
        try:
            generation = Generation.parse(what)
        except ValueError:
            raise UserError(
                f"{what[:60]!r} is not a key, job or generation",
                "",
                "write a key as 0x1000 or vlan100, a job as 42, a generation as 42.0.1a2b3c4d",
            ) from None
        found = [one for one in snapshot.assignments if one.generation == generation]
    if not found:
        raise UserError(f"key {what} is free, or job {what} has no key", "", "see: vhpc fabric ls")
    return found


def _whole(assignment: keys.KeyAssignment, record: LeaseRecord | None) -> dict[str, Any]:
    nodes = []
    for part in record.lease.allocation.nodes if record else ():
        unclean = dict(record.unclean) if record else {}
        said = "has not taken its lease"
        if record and part.node in record.taken:
            said = "is clean" if part.node in record.acknowledged else "holds its part"
        if part.node in unclean:
            said = "is not clean"
        nodes.append({"node": part.node, "said": said, "note": unclean.get(part.node, "")})
    return _fields(assignment) | {
        "lease": record.lease.state.value if record else None,
        "nodes": nodes,
        "port_guids": [f"{guid:#018x}" for guid in assignment.port_guids()],
    }


FENCE = """\
Fencing node {node} declares that it is OFF: powered down, or disconnected from the fabric, without a guest.
vhpcd then removes the keys of ended jobs that the node may still hold, and gives them to other jobs later.
A guest that still runs on the node could then communicate with those jobs.
"""


def fence(
    node: Annotated[str, typer.Argument(metavar="NODE", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask whether the node is off.")] = False,
    as_json: Json = False,
) -> int:
    """Declare that a node is OFF, so that keys of ended jobs need not wait for it (root or SlurmUser)."""
    config = options.config()
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(
                f"node {node} is not fenced",
                "stdin is not a terminal to confirm it",
                "--yes confirms that it is off",
            )
        print(FENCE.format(node=printable(node)), file=sys.stderr, end="")
        print(f"Is {printable(node)} off? Type its name: ", file=sys.stderr, end="", flush=True)
        if sys.stdin.readline().strip() != node:
            raise UserError(f"node {node} is not fenced", "you typed another name")
    done = ControllerClient(config).fence(node)
    if as_json:
        output.write_json({"node": node, "fenced": done.generations, "in_use": done.in_use})
    else:
        for name in done.generations:
            print(f"{name} no longer waits for {node}")
        for name in done.in_use:
            print(
                f"{name} still runs on {node}; end its job first: scontrol update NodeName={node} State=DOWN"
            )
    return 1 if done.in_use else 0


def clear(what: KeyOrJob, as_json: Json = False) -> int:
    """Remove a key's tombstone if no port of the fabric has that key (root, on vhpcd's host)."""
    config = options.config()
    with_tombstone = [one for one in _chosen(config, what) if one.state is keys.KeyState.TOMBSTONE]
    if not with_tombstone:
        raise UserError(f"{what} has no tombstone", "", "see: vhpc fabric ls")
    generations = [one.generation for one in with_tombstone]
    ControllerClient(config).clear(generations, patience_s(config))
    if as_json:
        output.write_json({"cleared": [str(one) for one in generations]})
    else:
        for one in with_tombstone:
            print(f"{one.generation}: no port has key {one.pkey:#06x}; it is free after its quarantine")
    return 0


def patience_s(config: Config) -> float:
    """Seconds that vhpcd may need for a change of the fabric."""
    return 4.0 * config.fabric.apply_timeout_s


def audit(as_json: Json = False) -> int:
    """Compare partitions file and port tables with the keys in use; exit 1 if anything differs (root)."""
    config = options.config()
    # Nothing is written here, so it does not matter whether this vhpcd owns the file.
    network = backend(config.fabric, lambda _epoch, _tag: False)
    found = network.audit(read_keys(config))
    if found:
        # vhpcd may not have written a change of the database to the fabric yet: such findings disappear.
        time.sleep(config.fabric.sweep_interval_s + AGAIN_S)
        again = network.audit(read_keys(config))
        found = tuple(one for one in again if one in found)
    if as_json:
        findings = [
            {
                "port_guid": f"{one.port_guid:#018x}" if one.port_guid else None,
                "what": one.what,
                "open": one.open,
            }
            for one in found
        ]
        output.write_json({"findings": findings})
    else:
        for one in found:
            print(printable(one.what))
    return 1 if found else 0
