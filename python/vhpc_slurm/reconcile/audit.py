# SPDX-License-Identifier: Apache-2.0
"""Orphans and stale generations on this node, each with its repair.

Compares the journals, the node itself (libvirt, processes, uids, folders, pins)
and vhpcd's leases.  Objects of a running hook or of a job with a live lease
stay; everything else is an orphan.
"""
# Decision: No age is computed by a wall clock

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from vhpc_slurm.model import Generation
from vhpc_slurm.node import teardown
from vhpc_slurm.node.devices.quarantine import QuarantinedError
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.host import steps
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.store import joblock, journal, outbox, usage
from vhpc_slurm.node.store.layout import Layout


def _never(job: object) -> bool:
    del job
    return False


def audit(
    layout: Layout,
    node: str,
    live: Mapping[int, Generation] | None,
    ended: Callable[[int], bool] = _never,
    left: Callable[[Generation], bool] = _never,
    before: Collection[Generation] | None = None,
) -> list[NodeFinding]:
    """Find stale generations and orphans.

    Args:
        layout: where the node keeps its state.
        node: this node's name.
        live: generations with a live lease for this node, by job; None when vhpcd did not answer,
            then only a generation whose end was interrupted counts as stale.
        ended: whether a job has ended for slurmctld, which waits for no Epilog of it; called
            only for jobs without a live lease whose steps still run here.
        left: whether this node has left the running job of a generation; called only
            for generations with a live lease and without a step that runs here.
        before: generations that had a journal before vhpcd was asked for ``live``, which says nothing about
            others; None: all.
    """
    return [
        *_stale_generations(layout, node, live, ended, left, before),
        *registry.orphans(layout),
    ]


def _stale_generations(
    layout: Layout,
    node: str,
    live: Mapping[int, Generation] | None,
    ended: Callable[[int], bool],
    left: Callable[[Generation], bool],
    before: Collection[Generation] | None,
) -> Iterator[NodeFinding]:
    running = steps.running()
    for generation in list(journal.generations(layout.journals)):
        if joblock.end_was_interrupted(layout, generation):
            # Slurm and vhpcd may have the job until a node tells them that it has ended here.
            if generation in journal.generations(layout.journals):
                yield NodeFinding(
                    Kind.STALE_GENERATION,
                    f"generation {generation} has a journal on this node, and its Epilog was interrupted",
                    partial(tombstone_and_clear, layout, generation, node),
                )
            continue
        if live is None or joblock.busy(layout, generation.job_id):
            continue
        if before is not None and generation not in before:
            continue
        if live.get(generation.job_id) == generation:
            # Slurm takes nodes from running jobs.
            if generation.job_id not in running and left(generation):
                yield NodeFinding(
                    Kind.STALE_GENERATION,
                    f"generation {generation} has a journal on this node, which has left the job",
                    partial(tombstone_and_clear, layout, generation, node),
                )
            continue
        # The lease ends with the job, when Slurm has only begun to end its processes: they have KillWait
        # seconds, and then the Epilog runs.  No Epilog runs for a job for whose end Slurm does not wait any
        # more, while its extern step may sleep on for hours.
        over = generation.job_id in running and (generation.job_id not in live or not generation.has_lease)
        if over and not ended(generation.job_id):
            continue
        yield NodeFinding(
            Kind.STALE_GENERATION,
            f"generation {generation} has a journal on this node, but no live lease",
            partial(tombstone_and_clear, layout, generation, node),
        )


def unacknowledged(layout: Layout, node: str, ending: Sequence[Generation]) -> Iterator[NodeFinding]:
    """Generations that have ended here and left nothing, and that vhpcd waits for.

    A hook that is killed after it removed a journal and before it queued the
    acknowledgement leaves neither, and vhpcd would never free the key.

    Args:
        layout: where the node keeps its state.
        node: this node's name.
        ending: generations that this node took and has not acknowledged, and whose lease has ended or whose
            Epilog has begun here.
    """
    running = steps.running()
    known = {*journal.generations(layout.journals), *outbox.queued(layout.outbox)}
    for generation in ending:
        if generation in known or joblock.busy(layout, generation.job_id):
            continue  # its Epilog still has to run, or runs now, and will acknowledge it
        if generation.job_id in running and not joblock.has_tombstone(layout, generation):
            continue
        yield NodeFinding(
            Kind.UNACKNOWLEDGED,
            f"generation {generation} has ended here, but vhpcd has no acknowledgement",
            partial(tombstone_and_clear, layout, generation, node),
        )


def tombstone_and_clear(layout: Layout, generation: Generation, node: str) -> None:
    """Remove everything of a generation that has no Epilog to come, and queue its acknowledgement.

    Raises:
        TeardownError: something could not be removed.
    """
    joblock.write_tombstone(layout, generation)
    with joblock.held(layout, generation.job_id, timeout_s=30.0, brief=True):
        quarantined: QuarantinedError | None = None
        try:
            teardown.clear(layout, generation, node)
        except QuarantinedError as err:
            quarantined = err
    note = quarantined.line() if quarantined else "cleared by reconcile"
    if generation.has_lease:
        used = usage.of_node(layout.usage(generation), generation, node)
        outbox.put(layout.outbox, outbox.Acknowledgement(generation, node, clean=True, note=note, usage=used))
    if quarantined:
        raise quarantined
