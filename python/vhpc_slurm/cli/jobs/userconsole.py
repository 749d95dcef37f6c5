# SPDX-License-Identifier: Apache-2.0
"""vhpc console for an ordinary user: a step of the user's own job reads the console on its node."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import IO

from vhpc_slurm import slurm
from vhpc_slurm.cli import output
from vhpc_slurm.cli.jobs import bootline
from vhpc_slurm.cli.jobs import ps as jobs
from vhpc_slurm.cli.jobs.console import CHUNK, Cleaner
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import Lease, LeaseState
from vhpc_slurm.slurm.port import NoSuchJobError, SlurmError

PROGRAM = "vhpc-console"
"""A task of this name runs on the node: vhpc-run prints a guest's console (guest/run/console.c)."""
NOTHING = (
    "no text from job {} yet: Slurm has not started the step that reads the console, or the guest has "
    "written nothing to it"
)
ASK_S = 3.0
"""Seconds without output after which the user is told why."""


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
        _wait(config, job_id, out)
        while raw := os.read(out.fileno(), CHUNK):
            yield cleaner.feed(raw)
    yield cleaner.feed(b"", last=True)


def _wait(config: Config, job_id: int, out: IO[bytes]) -> None:
    """Wait for the step's first output, and say on stderr why there is none yet.

    Slurm starts the step after the Prolog; a guest with a quiet kernel may write nothing at all.
    """
    said, said_at = "", 0.0
    while not select.select([out], [], [], ASK_S)[0]:
        what = _waits_for(config, job_id)
        plain, now = bootline.without_seconds(what), time.monotonic()
        if plain == said and (what == NOTHING.format(job_id) or now - said_at < bootline.AGAIN_S):
            continue
        print(f"vhpc: {what}", file=sys.stderr, flush=True)
        said, said_at = plain, now


def _waits_for(config: Config, job_id: int) -> str:
    record, progress = None, None
    with contextlib.suppress(VhpcError):  # this line is only to inform
        records, booting = jobs.client(config).booting(job_id=job_id)
        record = jobs.last(records)
        if record is not None:
            progress = booting.get(str(record.lease.generation))
    if record is None or progress is None:
        return NOTHING.format(job_id)
    line = bootline.line(record.lease.request.guests_per_node, progress)
    return f"job {job_id} boots, and its consoles can be read when all guests are ready: {line}"
