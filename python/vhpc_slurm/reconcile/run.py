# SPDX-License-Identifier: Apache-2.0
"""Reconcile a node: finish what a crash interrupted, and report what cannot be finished."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from vhpc_slurm import slurm
from vhpc_slurm.config import Config
from vhpc_slurm.controller.api.status_messages import FabricState
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Generation, LeaseRecord, LeaseState
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.store import joblock, journal, outbox
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import (
    acknowledging,
    attendants,
    audit,
    checkpoint_folders,
    ended_jobs,
    fabric_isolation,
    left_nodes,
    lost_jobs,
)
from vhpc_slurm.reconcile.finding import RepairResult, repair

ENDED = (LeaseState.ENDING, LeaseState.RELEASED)


def reconcile(config: Config, node: str, *, check: bool) -> list[RepairResult]:
    """Compare the node with journals, leases and Slurm's jobs; repair unless ``check``.

    Returns:
        One result per finding, in the order found; empty when the node is clean.
    """
    # Slurm ends a health check after a minute.
    layout, client = Layout(config), ControllerClient(config, patient=False)
    results: list[RepairResult] = []
    # A job may start while vhpcd answers. Of its lease the answer says nothing.
    before = frozenset(journal.generations(layout.journals))
    of_node: list[LeaseRecord] = []
    known: list[LeaseRecord] = []
    fabric, answered = FabricState(), False
    try:
        known = client.leases(live=True, timelines=False)
        of_node = _of_node(known, node)
        if any(record.lease.network.kind != "none" for record in _live(of_node)):
            fabric = client.status().fabric
        answered = True
    except FabricError as err:
        error = "generations and jobs were not compared with vhpcd's leases"
        results.append(RepairResult(Kind.CONTROLLER, err.line(), repaired=False, error=error))
    # One after the other: the next comparison must not find what a repair has just removed.
    live = {record.lease.generation.job_id: record.lease.generation for record in _live(of_node)}
    found = _findings(config, layout, node, of_node, known, live if answered else None, fabric, before)
    results.extend(repair(finding, check=check) for finding in found)
    results.extend(_acknowledgements(layout, client, check=check))
    results.extend(
        repair(finding, check=check)
        for finding in _refused(layout, _owed(layout, of_node, node) if answered else None)
    )
    if answered:
        unknown = checkpoint_folders.findings(config.checkpoint.folder, client)
        results.extend(repair(finding, check=check) for finding in unknown)
    return results


def _findings(
    config: Config,
    layout: Layout,
    node: str,
    of_node: list[LeaseRecord],
    known: list[LeaseRecord],
    live: dict[int, Generation] | None,
    fabric: FabricState,
    before: Collection[Generation],
) -> Iterator[NodeFinding]:
    """All findings; ``live`` are this node's generations by job, None when vhpcd did not answer."""
    port = slurm.commands(config)
    records = _live(of_node)
    yield from fabric_isolation.findings(layout, node, records, fabric)
    ended, left = partial(ended_jobs.has_ended, port), partial(left_nodes.has_left, port, node)
    yield from audit.audit(layout, node, live, ended, left, before)
    yield from attendants.findings(layout, node)
    yield from left_nodes.findings(layout, node, records, known)
    yield from audit.unacknowledged(layout, node, _owed(layout, of_node, node))
    yield from lost_jobs.findings(layout, node, records, slurm=port)


def _of_node(known: list[LeaseRecord], node: str) -> list[LeaseRecord]:
    """The leases with a part on this node."""
    return [record for record in known if any(part.node == node for part in record.lease.allocation.nodes)]


def _live(records: list[LeaseRecord]) -> list[LeaseRecord]:
    return [record for record in records if record.lease.state not in ENDED]


def _owed(layout: Layout, records: list[LeaseRecord], node: str) -> list[Generation]:
    """Generations that have ended, or whose Epilog began here, and that this node has not acknowledged.

    Slurm takes nodes from running jobs: the lease of a generation that has ended here may be live.
    """
    return [
        record.lease.generation
        for record in records
        if (record.lease.state is LeaseState.ENDING or joblock.has_tombstone(layout, record.lease.generation))
        and node in record.taken
        and node not in record.acknowledged
    ]


def _acknowledgements(layout: Layout, client: ControllerClient, *, check: bool) -> list[RepairResult]:
    waiting = len(outbox.pending(layout.outbox))
    if not waiting:
        return []
    what = f"{waiting} acknowledgements have not reached vhpcd"
    if check:
        return [RepairResult(Kind.OUTBOX, what, repaired=False)]
    left = acknowledging.deliver(layout.config, client, layout.outbox)
    error = f"vhpcd cannot be reached, or does not take {left} of them; hooks.log says why" if left else ""
    return [RepairResult(Kind.OUTBOX, what, repaired=left == 0, error=error)]


def _refused(layout: Layout, owed: Collection[Generation] | None) -> Iterator[NodeFinding]:
    """Acknowledgements that were set aside; ``owed`` are those that vhpcd waited for, None: not known."""
    for path in outbox.set_aside(layout.outbox):
        yield NodeFinding(
            Kind.REFUSED_ACKNOWLEDGEMENT,
            f"the acknowledgement {path} was set aside: it cannot be used",
            partial(_forget, path, owed),
        )


def _forget(path: Path, owed: Collection[Generation] | None) -> None:
    """Remove an acknowledgement that was set aside, once vhpcd has another one of its generation.

    Raises:
        FabricError: it has none.
    """
    if owed is None or path.stem in map(str, owed):
        raise FabricError(
            "vhpcd still waits for it" if owed is not None else "vhpcd did not say whether it waits for it",
            "the reason is in hooks.log, and in the log of vhpcd",
            "the next health check acknowledges the generation again",
        )
    path.unlink(missing_ok=True)
