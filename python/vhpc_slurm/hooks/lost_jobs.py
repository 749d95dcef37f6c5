# SPDX-License-Identifier: Apache-2.0
"""Jobs that Slurm believes to run here, and that do not.

A slurmctld that goes away between the end of the last Prolog and the start of
the script forgets to start it; a slurmstepd that is killed takes the script
with it, a reboot both and the guests.  Slurm finds out by itself, but only when
BatchStartTimeout is over, and guests need that to be long.  What Slurm would do
then is done here when the guests have been ready for a while, or are gone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.hooks import common
from vhpc_slurm.model import Generation, LeaseRecord
from vhpc_slurm.node import audit, joblock, journal, statefile, steps
from vhpc_slurm.node.layout import Layout
from vhpc_slurm.slurm.port import REASON_PROLOG, RUNNING, Slurm, requeue_or_cancel

KIND = "lost-start"
QUIET_S = 45.0
"""slurmctld starts a script within seconds of the last Prolog's end; this node's may have been the first."""
CONFIRM_S = 10.0
"""Between two looks: the script may be on its way at the first."""


def findings(
    layout: Layout,
    node: str,
    records: Sequence[LeaseRecord],
    *,
    slurm: Slurm,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[audit.NodeFinding]:
    """Jobs that Slurm takes for alive on this node, and that are not.

    Slurm is asked only about jobs for which no step but the one of their
    allocation runs here, so almost never.

    Args:
        layout: where the node keeps its state.
        node: this node.
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
            yield audit.NodeFinding(
                KIND, what, partial(requeue_or_cancel, slurm, lost.generation.job_id, lost.why)
            )


@dataclass(frozen=True, order=True)
class _LostJob:
    """A generation without any life on this node; ``guests`` tells whether it still has them."""

    generation: Generation
    why: str
    guests: bool


def _silent(layout: Layout, node: str, records: Sequence[LeaseRecord]) -> Iterator[_LostJob]:
    """Generations that have been ready (or refused) for a while without a step, or that a reboot ended."""
    now, running = time.time(), steps.running()
    known = set(journal.generations(layout.journals))
    for record in records:
        generation = record.lease.generation
        if joblock.busy(layout, generation.job_id):
            continue
        path = layout.state_file(generation.job_id)
        state, here = statefile.read_state(path), running.get(generation.job_id, frozenset())
        if not path.parent.exists():  # on a tmpfs, while the journal is on disk
            if generation in known and not here:
                yield _LostJob(generation, f"{node} was rebooted under it", guests=False)
            continue
        if state.get("generation") != str(generation) or state.get("status") not in ("ready", "failed"):
            continue
        # slurmctld starts the script on the first node of the allocation
        if record.lease.allocation.nodes[0].node != node or here != {steps.EXTERN}:
            continue
        with contextlib.suppress(FileNotFoundError):  # its Epilog has just begun
            if now - path.stat().st_mtime > QUIET_S:
                why = f"its guests are ready, and its script does not run on {node}"
                yield _LostJob(generation, why, guests=True)


def _should_run(slurm: Slurm, lost: _LostJob, node: str) -> bool:
    """Whether Slurm believes that the job is alive here; no when it cannot be asked."""
    generation = lost.generation
    try:
        job = slurm.load(generation.job_id)
    except (FabricError, UserError) as err:  # a user may give his running job a name that cannot be read
        common.log.info("job %d: %s", generation.job_id, err.line())
        return False
    if job.state != RUNNING or job.restarts != generation.restart:
        return False
    if job.reason == REASON_PROLOG:
        return not lost.guests  # beside ready guests, other nodes still boot theirs
    # what a reboot of another node than the script's means, the script's steps are told by Slurm
    return job.batch_host == node
