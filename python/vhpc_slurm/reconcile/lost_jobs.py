# SPDX-License-Identifier: Apache-2.0
"""Lost jobs: Slurm shows them as running on this node, but they do not run.

A slurmctld that is killed between the end of the last Prolog and the start of
the batch script never starts the script; a killed slurmstepd ends the script; a
reboot ends the script and the guests.  Slurm notices by itself, but only after
BatchStartTimeout, which must be long because guests have to boot.  This module
requeues or cancels such a job earlier: when its guests have been ready for a
while without a script, or are gone after a reboot.  vhpcd finds jobs without a Prolog
(``controller.leases.reconcile``): their nodes have no trace of them.
"""
# Decision: Lost jobs are found before BatchStartTimeout

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import Generation, LeaseRecord
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.host import steps
from vhpc_slurm.node.store import joblock, journal, statefile
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record
from vhpc_slurm.slurm.port import CONFIGURING, REASON_PROLOG, RUNNING, Slurm, SlurmJob, requeue_or_cancel

log = logging.getLogger("vhpc")
QUIET_S = 45.0
"""slurmctld starts a script within seconds after the last Prolog; this node's may have been the first."""
CONFIRM_S = 10.0
"""Pause between two checks: at the first one slurmctld may be about to start the script."""


def findings(
    layout: Layout,
    node: str,
    records: Sequence[LeaseRecord],
    *,
    slurm: Slurm,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[NodeFinding]:
    """Jobs that run on this node according to Slurm, but do not.

    Slurm is asked only about jobs without any step here except the extern step,
    so rarely.

    Args:
        layout: where the node keeps its state.
        node: this node's name.
        records: live leases with a part on this node.
        slurm: the port; through Slurm's own commands, because only they tell batch jobs from others.
        pause: how to wait.
    """
    found = {lost for lost in _silent(layout, node, records) if _should_run(slurm, lost, node)}
    if not found:
        return
    pause(CONFIRM_S)
    for lost in sorted(found.intersection(_silent(layout, node, records))):
        if _should_run(slurm, lost, node):
            what = f"job {lost.generation.job_id}: {lost.why}"
            yield NodeFinding(
                Kind.LOST_START, what, partial(requeue_or_cancel, slurm, lost.generation.job_id, lost.why)
            )


class _LostJob(Record, frozen=True, order=True):
    """A generation without a script that runs here; ``guests``: whether it still has its guests."""

    generation: Generation
    why: str
    guests: bool


def _silent(layout: Layout, node: str, records: Sequence[LeaseRecord]) -> Iterator[_LostJob]:
    """Generations without a script that runs here.

    They have been ready (or refused) for a while without a step, or were ended by a reboot.
    """
    running = steps.running()
    known = set(journal.generations(layout.journals))
    for record in records:
        generation = record.lease.generation
        if joblock.busy(layout, generation.job_id) or joblock.has_tombstone(layout, generation):
            continue
        path = layout.state_file(generation.job_id)
        state, here = statefile.read_state(path), running.get(generation.job_id, frozenset())
        if not path.parent.exists():  # on a tmpfs, while the journal is on disk
            if generation in known and not here:
                yield _LostJob(generation, f"{node} was rebooted while it ran", guests=False)
            continue
        if state.get("generation") != str(generation) or state.get("status") not in ("ready", "failed"):
            continue
        # slurmctld starts the script on the first node of the allocation
        if record.lease.allocation.nodes[0].node != node or here != {steps.EXTERN}:
            continue
        if statefile.age(state) > QUIET_S:
            why = f"its guests are ready but its batch script does not run on {node}"
            yield _LostJob(generation, why, guests=True)


def _should_run(slurm: Slurm, lost: _LostJob, node: str) -> bool:
    """Whether the job runs here according to Slurm; False when Slurm does not answer."""
    generation = lost.generation
    try:
        job = slurm.load(generation.job_id)
    except (
        FabricError,
        UserError,
    ) as err:  # a user may rename a running job so that its record cannot be parsed
        log.info("job %d: %s", generation.job_id, err.line())
        return False
    if job.state != RUNNING or job.restarts != generation.restart:
        return False
    if job.reason == REASON_PROLOG:
        return not lost.guests  # guests are ready here, but other nodes still boot theirs
    # when another node than the script's is rebooted, Slurm tells the steps of the script itself
    return job.batch_host == node and not (lost.guests and _boots_elsewhere(slurm, job))


def _boots_elsewhere(slurm: Slurm, job: SlurmJob) -> bool:
    """Whether the script of a heterogeneous job waits for the nodes of another component.

    Components have consecutive JobIds.
    """
    for offset in range(1, job.het.components if job.het is not None else 1):
        with contextlib.suppress(FabricError, UserError):
            other = slurm.load(job.job_id + offset)
            if other.reason == REASON_PROLOG or other.state == CONFIGURING:
                return True
    return False
