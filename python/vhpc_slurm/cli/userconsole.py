# SPDX-License-Identifier: Apache-2.0
"""vhpc console for an ordinary user: a step of the user's own job reads the console on its node."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from vhpc_slurm import slurm
from vhpc_slurm.cli import jobs, output
from vhpc_slurm.cli.console import CHUNK, Cleaner
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Lease, LeaseState
from vhpc_slurm.slurm.port import NoSuchJobError, SlurmError

PROGRAM = "vhpc-console"
"""A task of this name runs on the node: vhpc-run prints a guest's console (guest/run/console.c)."""


def console(config: Config, job_id: int, node: str | None, guest: int, *, follow: bool, as_json: bool) -> int:
    """Print the console of a guest of the user's running job.

    Raises:
        UserError: no such job of the user, it does not run, it has no such guest, or Slurm refuses the step.
        FabricError: vhpcd or Slurm cannot be reached.
    """
    record = jobs.of_job(config, job_id)
    if record is None:
        raise jobs.unknown(job_id)
    where = _place(record.lease, node, guest)
    pieces = _pieces(config, job_id, where, guest, follow=follow)
    if as_json:
        output.write_json({"job": job_id, "node": where, "guest": guest, "console": "".join(pieces)})
        return 0
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except UserError:
        if not (follow and _has_ended(config, job_id)):
            raise
    return 0


def _has_ended(config: Config, job_id: int) -> bool:
    """Whether the step ended because its job did: Slurm ends the steps before the Epilog."""
    try:
        return slurm.user_jobs(config).state(job_id).state not in ("RUNNING", "SUSPENDED")
    except NoSuchJobError:
        return True
    except SlurmError:
        return False


def _place(lease: Lease, node: str | None, guest: int) -> str:
    """The node of the guest; UserError if the job has no such guest now."""
    job_id, names = lease.generation.job_id, lease.allocation.node_names
    if lease.state is LeaseState.REFUSED:
        raise UserError(f"job {job_id} has no guests", lease.refusal)
    if lease.state not in (LeaseState.RESERVED, LeaseState.READY):
        raise UserError(
            f"job {job_id} has ended",
            "consoles are on its nodes while it runs",
            "sbatch --vhpc-console=PATH keeps them after the end of the job",
        )
    if node is not None and node not in names:
        raise UserError(f"job {job_id} has no guest on {node}", f"its nodes are {output.node_list(names)}")
    if guest >= lease.request.guests_per_node:
        raise UserError(
            f"job {job_id} has no guest {guest} on a node",
            f"it has {lease.request.guests_per_node} on each, counted from 0",
        )
    return node or names[0]


def _pieces(config: Config, job_id: int, node: str, guest: int, *, follow: bool) -> Iterator[str]:
    """The cleaned text of the console as the step prints it."""
    command = [PROGRAM, str(guest), *(["follow"] if follow else [])]
    cleaner = Cleaner()
    with slurm.user_jobs(config).step(job_id, command, node) as out:
        while raw := os.read(out.fileno(), CHUNK):
            yield cleaner.feed(raw)
    yield cleaner.feed(b"", last=True)
