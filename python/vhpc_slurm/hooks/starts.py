"""Jobs whose guests are ready and whose batch script does not run.

A slurmctld that goes away between the end of the last Prolog and the start of
the script forgets to start it; a slurmstepd that is killed takes the script
with it.  Slurm finds out by itself, but only when BatchStartTimeout is over,
and guests need that to be long.  What Slurm would do then is done here when
the guests have been ready for a while.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError
from vhpc_slurm.hooks import common
from vhpc_slurm.model import Generation, LeaseRecord
from vhpc_slurm.node import audit, statefile, steps
from vhpc_slurm.node.layout import Layout
from vhpc_slurm.slurm.job import REASON_PROLOG, RUNNING, Slurm, start_again
from vhpc_slurm.slurm.scontrol import Scontrol

KIND = "lost-start"
QUIET_S = 45.0
"""slurmctld starts a script within seconds of the last Prolog's end; this node's may have been the first."""
CONFIRM_S = 10.0
"""Between two looks: the script may be on its way at the first."""


def lost(
    config: Config,
    node: str,
    records: Sequence[LeaseRecord],
    *,
    slurm: Slurm | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[audit.Finding]:
    """Jobs whose batch script should run on this node, and does not.

    Slurm is asked only about jobs for which no step but the one of their
    allocation runs here, so almost never.

    Args:
        config: the configuration.
        node: this node.
        records: live leases with a part on this node.
        slurm: the port; default is Slurm's own commands, because only they tell batch jobs from others.
        pause: how to wait.
    """
    layout = Layout(config)
    slurm = slurm or Scontrol(config.controller.slurm_bin, slurm_conf=config.controller.slurm_conf)
    found = [
        generation for generation in _silent(layout, node, records) if _should_run(slurm, generation, node)
    ]
    if not found:
        return
    pause(CONFIRM_S)
    still = set(_silent(layout, node, records))
    for generation in found:
        if generation in still and _should_run(slurm, generation, node):
            why = f"its guests are ready, and its script does not run on {node}"
            what = f"job {generation.job_id}: {why}"
            yield audit.Finding(KIND, what, partial(start_again, slurm, generation.job_id, why))


def _silent(layout: Layout, node: str, records: Sequence[LeaseRecord]) -> Iterator[Generation]:
    """Generations that have been ready (or refused) for a while, without a step on this node."""
    now, running = time.time(), steps.running()
    for record in records:
        generation = record.lease.generation
        # slurmctld starts the script on the first node of the allocation
        if record.lease.allocation.nodes[0].node != node:
            continue
        path = layout.state_file(generation.job_id)
        state = statefile.read(path)
        if state.get("generation") != str(generation) or state.get("status") not in ("ready", "failed"):
            continue
        if running.get(generation.job_id, frozenset()) != {steps.EXTERN}:
            continue
        with contextlib.suppress(FileNotFoundError):  # its Epilog has just begun
            if now - path.stat().st_mtime > QUIET_S:
                yield generation


def _should_run(slurm: Slurm, generation: Generation, node: str) -> bool:
    """Whether Slurm believes that the script runs here; no when it cannot be asked."""
    try:
        job = slurm.load(generation.job_id)
    except FabricError as err:
        common.log.info("job %d: %s", generation.job_id, err.line())
        return False
    return (
        job.state == RUNNING
        and job.reason != REASON_PROLOG
        and job.restarts == generation.restart
        and job.batch_host == node
    )
