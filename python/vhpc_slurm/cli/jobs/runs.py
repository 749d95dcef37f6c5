# SPDX-License-Identifier: Apache-2.0
"""The runs of a job, one for each start by Slurm, with the checkpoints that were made of them.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vhpc_slurm.cli import output
from vhpc_slurm.cli.jobs import bootline
from vhpc_slurm.model import UNFINISHED, Checkpoint, CheckpointState, LeaseRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vhpc_slurm.controller.wire_types import ProgressWire

RUN_HEAD = ("RUN", "BEGAN", "STATE", "NODES", "GUESTS RAN AFTER s", "NOTE")
CHECKPOINT_HEAD = ("RUN", "CHECKPOINT", "BEGAN", "PAUSE s", "SIZE", "MiB/s", "END")
RIGHT = ("RUN", "GUESTS RAN AFTER s", "PAUSE s", "SIZE", "MiB/s")
"""Columns of numbers."""


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        record: its lease, with timelines.
        checkpoints: that were made of it and are still known, oldest first.
        progress: how far its boot is; None: it does not boot.
    """

    record: LeaseRecord
    checkpoints: tuple[Checkpoint, ...] = ()
    progress: ProgressWire | None = None


def make(
    records: Iterable[LeaseRecord],
    checkpoints: Iterable[Checkpoint],
    progress: Mapping[str, ProgressWire],
) -> tuple[Run, ...]:
    """The runs of a job, oldest first."""
    made = list(checkpoints)
    ordered = sorted(records, key=lambda one: (one.lease.generation.restart, one.created))
    return tuple(
        Run(
            record,
            tuple(one for one in made if one.generation == record.lease.generation),
            progress.get(str(record.lease.generation)),
        )
        for record in ordered
    )


def end(one: Checkpoint) -> str | None:
    """How a checkpoint ended: continued, stopped, requeued or failed; None: it is being made."""
    if one.state in UNFINISHED:
        return None
    if one.state is CheckpointState.FAILED:
        return "failed"
    return "requeued" if one.requeue else "stopped" if one.stop else "continued"


def mib_s(one: Checkpoint) -> float | None:
    """The rate at which all nodes together have written a checkpoint; None if it has no files."""
    return one.size / one.seconds / (1 << 20) if one.size and one.seconds else None


def document(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The runs in JSON; vhpc(1) has the keys."""
    return [of_run(run) for run in runs]


def of_run(run: Run) -> dict[str, Any]:
    """One run in JSON."""
    lease, resume = run.record.lease, run.record.lease.resume
    return {
        "restart": lease.generation.restart,
        "generation": str(lease.generation),
        "state": bootline.state(lease, run.progress),
        "began": run.record.created,
        "nodes": list(lease.allocation.node_names),
        "ready_s": run.record.ready_s,
        "continued": resume
        and {
            "checkpoint": resume.name,
            "serial": resume.serial,
            "job": resume.origin.job_id,
            "generation": str(resume.origin),
        },
        "checkpoints": [_checkpoint(one) for one in run.checkpoints],
    }


def _checkpoint(one: Checkpoint) -> dict[str, Any]:
    rate = mib_s(one)
    return {
        "name": one.name,
        "serial": one.serial,
        "began": one.created,
        "state": one.state.value,
        "end": end(one),
        "error": one.error or None,
        "pause_s": one.paused_s,
        "bytes": one.size,
        "write_s": round(one.seconds, 3),
        "mib_s": None if rate is None else round(rate, 1),
    }


@dataclass(frozen=True)
class Table:
    """A table for people; ``rows`` has texts."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(runs: Sequence[Run]) -> list[Table]:
    """The runs, if there are several or one continues a checkpoint, and the checkpoints, if there are any."""
    several = len(runs) > 1 or any(run.record.lease.resume for run in runs)
    found = (Table("Runs", RUN_HEAD, _rows(runs) if several else []), checkpoint_table(runs))
    return [table for table in found if table.rows]


def _rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    return [
        (
            str(run.record.lease.generation.restart),
            output.date(run.record.created),
            bootline.state(run.record.lease, run.progress),
            output.node_list(run.record.lease.allocation.node_names),
            "-" if run.record.ready_s is None else f"{run.record.ready_s:.3f}",
            "; ".join(filter(None, (origin(run.record), run.record.note))),
        )
        for run in runs
    ]


def origin(record: LeaseRecord) -> str:
    """The checkpoint that a run continues, with the job that it was made of; empty without one."""
    resume = record.lease.resume
    if resume is None:
        return ""
    own = resume.origin.job_id == record.lease.generation.job_id
    whose = f"run {resume.origin.restart}" if own else f"job {resume.origin.job_id}"
    return f"continues checkpoint {resume.name} of {whose}"


def checkpoint_table(runs: Sequence[Run]) -> Table:
    """A row for each checkpoint of some runs."""
    found: list[tuple[str, ...]] = []
    for run in runs:
        for one in run.checkpoints:
            rate = mib_s(one)
            found.append(
                (
                    str(one.generation.restart),
                    one.name,
                    output.date(one.created),
                    "-" if one.paused_s is None else f"{one.paused_s:.3f}",
                    output.size(one.size) if one.size else "-",
                    "-" if rate is None else f"{rate:.1f}",
                    _end_text(one),
                )
            )
    return Table("Checkpoints", CHECKPOINT_HEAD, found)


def _end_text(one: Checkpoint) -> str:
    if one.state is CheckpointState.FAILED:
        return f"failed: {one.error}"
    removed = ", removed" if one.state is CheckpointState.REMOVED else ""
    return f"{end(one) or one.state.value}{removed}"
