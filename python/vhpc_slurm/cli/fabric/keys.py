# SPDX-License-Identifier: Apache-2.0
"""vhpc fabric: partition keys from vhpcd's database, and OpenSM's partitions file."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

from vhpc_slurm.cli import output
from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.store.choice import read_keys
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric import keys, numbers, partitions, plainfile
from vhpc_slurm.fabric.select import backend, site_partitions, static_pool
from vhpc_slurm.model import Generation, LeaseRecord
from vhpc_slurm.terminal import printable

MAX_FILE = 256 << 20
"""Bytes of the largest partitions file that is read; a pool of a million GUIDs has 26 MB."""


AGAIN_S = 1.0
"""Pause between two audits: vhpcd may be changing the fabric during the first."""


def ls(config: Config, *, as_json: bool) -> int:
    """List the keys that are not free."""
    snapshot = read_keys(config)
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


def show(config: Config, what: str, *, as_json: bool) -> int:
    """Show the assignments of a key, a job or a generation, with their nodes and ports."""
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


def fence(config: Config, node: str, *, yes: bool, as_json: bool) -> int:
    """Declare a node off, so that ended generations need not wait for it."""
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


def clear(config: Config, what: str, *, as_json: bool) -> int:
    """Remove tombstones if no port of the fabric has their keys."""
    with_tombstone = [one for one in _chosen(config, what) if one.state is keys.KeyState.TOMBSTONE]
    if not with_tombstone:
        raise UserError(f"{what} has no tombstone", "", "see: vhpc fabric ls")
    generations = [one.generation for one in with_tombstone]
    ControllerClient(config).clear(generations, _patience(config))
    if as_json:
        output.write_json({"cleared": [str(one) for one in generations]})
    else:
        for one in with_tombstone:
            print(f"{one.generation}: no port has key {one.pkey:#06x}; it is free after its quarantine")
    return 0


def install(config: Config, *, force: bool, as_json: bool) -> int:
    """Let vhpcd write all keys in use to the fabric again."""
    ControllerClient(config).tell_fabric(force=force, wait_s=_patience(config))
    if as_json:
        output.write_json({"told": True})
    else:
        print("vhpcd wrote the keys in use to the fabric")
    return 0


def _patience(config: Config) -> float:
    """Seconds that vhpcd may need for a change of the fabric."""
    return 4.0 * config.fabric.apply_timeout_s


def audit(config: Config, *, as_json: bool) -> int:
    """Compare the fabric with the keys in use; return 1 when anything differs."""
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


def render(config: Config, *, pool: bool, as_json: bool) -> int:
    """Print the partitions file."""
    fabric = config.fabric
    snapshot = keys.KeySnapshot(0) if pool else read_keys(config)
    found = static_pool(fabric) if pool else partitions.of_snapshot(snapshot, ipoib=fabric.ipoib)
    found = (*found, *site_partitions(fabric))
    if as_json:
        output.write_json(
            {
                "epoch": snapshot.epoch,
                "partitions": [
                    {
                        "name": one.name,
                        "pkey": f"{one.pkey:#06x}",
                        "flags": one.flags,
                        "members": {member: "full" if full else "limited" for member, full in one.members},
                    }
                    for one in found
                ],
            }
        )
        return 0
    sys.stdout.write(partitions.render(found, snapshot.epoch, snapshot.tag).decode())
    return 0


def lint(file: str, *, as_json: bool) -> int:
    """Check a partitions file; return 1 when it has defects."""
    defects = partitions.lint(_read(file))
    if as_json:
        output.write_json({"file": file, "defects": defects})
    else:
        for defect in defects:
            print(f"{printable(file)}:{defect.line}: {printable(defect.reason)}")
    return 1 if defects else 0


def _read(file: str) -> bytes:
    try:
        data = plainfile.read_file(Path(file), MAX_FILE)
    except FabricError as err:
        raise UserError(err.what, err.why) from err
    if data is None:
        raise UserError(f"cannot read {file}", "No such file or directory")
    return data
