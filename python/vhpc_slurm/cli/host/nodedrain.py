# SPDX-License-Identifier: Apache-2.0
"""vhpc node drain: no new jobs for a node, and its jobs with guests continue elsewhere."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from vhpc_slurm.cli import context, leases, options, output
from vhpc_slurm.cli.options import Json
from vhpc_slurm.cli.progress import progress
from vhpc_slurm.cli.verbs import Group, Verb
from vhpc_slurm.controller import checkpoint_client
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Checkpoint, CheckpointState, LeaseState
from vhpc_slurm.slurm import commands

if TYPE_CHECKING:
    from vhpc_slurm.controller.client import ControllerClient

SLURM_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Saved:
    """A job of the node: the name of its checkpoint, or why it stays."""

    job: int
    user: str
    checkpoint: str | None = None
    error: str | None = None


GROUP = Group(
    Verb(
        "drain",
        "host.nodedrain:drain",
        "Drain a node, save its jobs with guests, and put them back into the queue.",
    ),
)


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of a node in Slurm.")],
    reason: Annotated[
        str | None,
        typer.Option("--reason", metavar="TEXT", help="Reason of the drained node.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> int:
    """Drain a node, save its jobs with guests, and put them back into the queue.

    Slurm starts no more jobs on the node. The saved jobs continue on other nodes, also those that run on
    several nodes. A job that cannot be saved stays and is listed with the reason; run the command again
    later. Jobs without guests stay. Root and SlurmUser can do this.
    """
    config, name = options.config(), context.node_name(node)
    context.need_listener("node drain", config)
    commands(config, SLURM_TIMEOUT_S).drain(name, reason or f"vhpc node drain by {context.user_name()}")
    done = _save_all(leases.client(config), name)
    if as_json:
        output.write_json({"node": name, "jobs": [asdict(one) for one in done]})
        return _status(done)
    rows = [
        (str(one.job), one.user, "stays" if one.error else "saved", one.error or one.checkpoint or "")
        for one in done
    ]
    output.write_table(("JOB", "USER", "STATE", "CHECKPOINT OR REASON"), rows, right=("JOB",))
    return _status(done)


def _status(done: list[Saved]) -> int:
    return 1 if any(one.error for one in done) else 0


def _save_all(client: ControllerClient, node: str) -> list[Saved]:
    """Save all jobs with guests on a node at the same time."""
    leases = (record.lease for record in client.leases(live=True, timelines=False))
    jobs = sorted(
        (
            Saved(lease.generation.job_id, lease.request.user)
            for lease in leases
            if lease.state in (LeaseState.RESERVED, LeaseState.READY) and node in lease.allocation.node_names
        ),
        key=lambda saved: saved.job,
    )
    begun: dict[int, Checkpoint | UserError] = {}
    for one in jobs:
        try:
            begun[one.job] = client.save(one.job, requeue=True)
        except UserError as err:
            begun[one.job] = err
    done = []
    for number, one in enumerate(jobs, 1):
        made = begun[one.job]
        if isinstance(made, UserError):
            done.append(replace(one, error=made.line()))
            continue
        progress(f"job {one.job} is being saved (job {number} of {len(jobs)})")
        made = checkpoint_client.completed(client, made)
        valid = made.state is CheckpointState.VALID
        done.append(replace(one, checkpoint=made.name) if valid else replace(one, error=made.error))
    return done
