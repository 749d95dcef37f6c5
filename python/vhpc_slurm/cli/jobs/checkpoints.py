# SPDX-License-Identifier: Apache-2.0
"""vhpc checkpoint: save the guests of a job; list, show and remove what was saved."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vhpc_slurm.cli import context, leases, options, output
from vhpc_slurm.cli.options import JobId, Json
from vhpc_slurm.cli.progress import progress
from vhpc_slurm.cli.verbs import Group, Verb
from vhpc_slurm.controller import checkpoint_client
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import CheckpointState

if TYPE_CHECKING:
    from vhpc_slurm.model import Checkpoint, CheckpointTotal

AGE = re.compile(r"([0-9]{1,5})([hd])", re.ASCII)
SEE = "see: vhpc checkpoint ls"
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of one of your checkpoints.", show_default=False)
]

GROUP = Group(
    Verb(
        "save",
        "jobs.checkpoints:save",
        "Save all guests of your running job together: memory, devices and disks; save may be left out.",
    ),
    Verb(
        "ls",
        "jobs.checkpoints:ls",
        "List your checkpoints, the newest last; root and SlurmUser see those of all users.",
    ),
    Verb("show", "jobs.checkpoints:show", "Show one of your checkpoints."),
    Verb(
        "rm",
        "jobs.checkpoints:remove",
        "Remove checkpoints of yours; the nodes delete their files soon after.",
    ),
    default="save",
)


def save(
    job_id: JobId,
    stop: Annotated[bool, typer.Option("--stop", help="End the job when it is saved.")] = False,
    requeue: Annotated[
        bool,
        typer.Option(
            "--requeue", help="Put the job back into the queue when it is saved; its next run continues."
        ),
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Default: JOBID.NUMBER.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> int:
    """Save all guests of your running job together: memory, devices and disks; save may be left out.

    The job waits meanwhile, and continues afterwards. `sbatch --vhpc-resume=NAME` continues from it later.
    Commands of Slurm in the job are waited for, and steps that cannot continue. With --requeue submit the job
    with --open-mode=append: without it Slurm empties the output file of a job that starts again.
    """
    if stop and requeue:
        raise UserError(
            "--stop and --requeue cannot be given together", "--stop ends the job, --requeue starts it again"
        )
    client = leases.client(options.config())
    said = ""

    def doing(made: Checkpoint) -> None:
        nonlocal said
        if (line := _doing(made)) != said:
            progress(line)
            said = line

    begun = client.save(job_id, name, stop=stop, requeue=requeue)
    found = checkpoint_client.completed(client, begun, doing)
    if found.state is not CheckpointState.VALID:
        raise UserError(
            f"job {job_id} was not saved", found.error, "the job continues" if found.running else ""
        )
    if as_json:
        output.write_json(_json(found))
        return 0
    progress(f"{_called(found)}: valid, {output.size(found.size)} in {found.seconds:.1f} s")
    print(found.name)
    return 0


def ls(
    job_id: Annotated[
        int | None, typer.Option("--job", metavar="JOBID", min=1, help="Only those of this job.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also removed ones, for a week.")] = False,
    as_json: Json = False,
) -> int:
    """List your checkpoints, the newest last; root and SlurmUser see those of all users."""
    known, totals = leases.client(options.config()).checkpoints_and_totals(job_id)
    found = [one for one in known if everything or one.state is not CheckpointState.REMOVED]
    if as_json:
        output.write_json(
            {"checkpoints": [_json(one) for one in found], "totals": [_total_json(one) for one in totals]}
        )
        return 0
    rows = [
        (
            one.name,
            context.user_name(one.uid),
            str(one.generation.job_id),
            one.state.value,
            output.size(one.size) if one.size else "",
            output.date(one.created),
            one.error or (f"resumed by job {one.resumed_by.job_id}" if one.resumed_by else ""),
        )
        for one in found
    ]
    output.write_table(("NAME", "USER", "JOB", "STATE", "SIZE", "TIME", "NOTE"), rows, right=("SIZE",))
    for one in totals:
        print(_total_line(one))
    return 0


def show(name: Name, as_json: Json = False) -> int:
    """Show one of your checkpoints."""
    found = _newest(leases.client(options.config()).checkpoints(), name)
    if as_json:
        output.write_json(_json(found))
        return 0
    guests = [guest for node in found.nodes for guest in node.guests]
    facts = [
        ("Checkpoint", f"{found.name} (number {found.serial})"),
        ("User", context.user_name(found.uid)),
        ("Job", str(found.generation.job_id)),
        ("State", found.state.value),
        ("Made", output.date(found.created)),
        ("Image", found.image),
        ("Nodes", output.node_list(node.node for node in found.nodes)),
    ]
    if found.error:
        facts.append(("Error", found.error))
    if guests:
        facts += [
            ("Guests", f"{len(guests)}, each with {guests[0].vcpus} CPUs and {guests[0].memory_mib} MiB"),
            ("CPU", found.nodes[0].cpu),
            ("Size", f"{output.size(found.size)}, written in {found.seconds:.1f} s"),
            ("Encrypted", "yes" if found.encrypted else "no"),
        ]
    if found.resumed_by:
        facts.append(("Resumed by", f"job {found.resumed_by.job_id}"))
    output.write_facts(facts)
    return 0


def remove(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Names of your checkpoints.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="AGE",
            help="Those that were made so many hours (12h) or days (7d) ago, and that no job in the queue "
            "can continue.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Remove checkpoints of yours; the nodes delete their files soon after.

    If one of the names cannot be removed, the others are, and the exit status is 1.
    """
    if bool(names) == (older_than is not None):
        raise UserError("names of checkpoints are expected, or --older-than", "", SEE)
    older_s = None if older_than is None else _seconds_of(older_than)
    done = leases.client(options.config()).remove_checkpoints(names or [], older_s)
    refused = [UserError(f"you have no checkpoint {name[:80]!r}", "", SEE) for name in done.missing]
    refused += [UserError(f"checkpoint {one.name} is in use", one.why) for one in done.in_use]
    for err in refused:
        progress(err.line())
    if as_json:
        output.write_json(
            {
                "removed": done.removed,
                "missing": done.missing,
                "in_use": [{"name": one.name, "reason": one.why} for one in done.in_use],
            }
        )
    elif older_than is not None:
        for name in done.removed:
            print(name)
    return int(bool(refused))


def _seconds_of(age: str) -> float:
    found = AGE.fullmatch(age)
    if found is None:
        raise UserError(f"{age[:80]!r} is not an age", "hours (12h) or days (7d) are expected")
    return int(found[1]) * (3600.0 if found[2] == "h" else 86400.0)


def _newest(found: tuple[Checkpoint, ...], name: str) -> Checkpoint:
    """The newest checkpoint of a name; UserError without one."""
    named = [one for one in found if one.name == name and one.state is not CheckpointState.REMOVED]
    valid = [one for one in named if one.state is CheckpointState.VALID]
    if not named:
        raise UserError(f"you have no checkpoint {name[:80]!r}", "", SEE)
    return (valid or named)[-1]


def _called(found: Checkpoint) -> str:
    return f"checkpoint {found.name} of job {found.generation.job_id}"


def _doing(found: Checkpoint) -> str:
    if found.state is CheckpointState.HOLDING:
        return f"{_called(found)}: {found.held} of {found.node_count} nodes have stopped their guests"
    return f"{_called(found)}: {len(found.nodes)} of {found.node_count} nodes have saved their guests"


def _total_line(total: CheckpointTotal) -> str:
    line = f"Total of {total.owner} {total.name}: {output.size(total.bytes)}"
    if total.limit is None:
        return line
    return f"{line} of {output.size(total.limit)} (policy rule {total.rule!r})"


def _total_json(total: CheckpointTotal) -> dict[str, Any]:
    return {
        "owner": total.owner,
        "name": total.name,
        "bytes": total.bytes,
        "limit_bytes": total.limit,
        "rule": total.rule or None,
    }


def _json(found: Checkpoint) -> dict[str, Any]:
    return {
        "name": found.name,
        "serial": found.serial,
        "user": context.user_name(found.uid),
        "job": found.generation.job_id,
        "generation": str(found.generation),
        "state": found.state.value,
        "created": found.created,
        "stop": found.stop,
        "requeue": found.requeue,
        "image": found.image,
        "error": found.error or None,
        "bytes": found.size,
        "encrypted": found.encrypted,
        "seconds": round(found.seconds, 3),
        "paused_s": found.paused_s,
        "resumed_by": str(found.resumed_by) if found.resumed_by else None,
        "nodes": [node.node for node in found.nodes],
        "guests": [
            {
                "rank": guest.rank,
                "hostname": guest.hostname,
                "node": node.node,
                "cpus": guest.vcpus,
                "memory_mib": guest.memory_mib,
                "state_bytes": guest.state.size,
                "disk_bytes": guest.disk.size if guest.disk else None,
            }
            for node in found.nodes
            for guest in node.guests
        ],
    }
