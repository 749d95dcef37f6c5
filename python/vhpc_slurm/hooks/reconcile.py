# SPDX-License-Identifier: Apache-2.0
"""Reconcile a node: finish what a crash left, report or drain for what cannot be finished.

Runs as Slurm's HealthCheckProgram (before slurmd registers, then at
intervals) and by hand as ``vhpc reconcile``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial

from vhpc_slurm import slurm
from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.protocol import FabricState
from vhpc_slurm.errors import FabricError, TeardownError, VhpcError
from vhpc_slurm.hooks import common, fabric_isolation, lost_jobs, purged_jobs
from vhpc_slurm.model import Generation, LeaseRecord, LeaseState
from vhpc_slurm.node import audit, outbox
from vhpc_slurm.node.layout import Layout

ENDED = (LeaseState.ENDING, LeaseState.RELEASED)


@dataclass(frozen=True)
class RepairResult:
    """What a reconciliation found, in the order found; ``error`` is empty for what was repaired."""

    kind: str
    what: str
    repaired: bool
    error: str = ""


def reconcile(config: Config, node: str, *, check: bool) -> list[RepairResult]:
    """Compare and, unless ``check``, repair.  An empty list means clean."""
    layout = Layout(config)
    client, port = ControllerClient(config), slurm.commands(config)
    outcomes: list[RepairResult] = []
    live: dict[int, Generation] | None = None
    of_node: list[LeaseRecord] = []
    records: list[LeaseRecord] = []
    fabric = FabricState()
    try:
        of_node = _of_node(client, node)
        records = [record for record in of_node if record.lease.state not in ENDED]
        if any(record.lease.network.kind != "none" for record in records):
            fabric = client.status().fabric
        live = {record.lease.generation.job_id: record.lease.generation for record in records}
    except FabricError as err:
        outcomes.append(
            RepairResult("controller", err.line(), repaired=False, error="the controller's view is missing")
        )
    outcomes.extend(
        _repair(finding, check=check) for finding in fabric_isolation.findings(layout, node, records, fabric)
    )
    unknown = partial(purged_jobs.is_purged, port)
    outcomes.extend(_repair(finding, check=check) for finding in audit.audit(layout, node, live, unknown))
    outcomes.extend(
        _repair(finding, check=check) for finding in audit.unacknowledged(layout, node, _owed(of_node, node))
    )
    outcomes.extend(
        _repair(finding, check=check) for finding in lost_jobs.findings(layout, node, records, slurm=port)
    )
    outcomes.extend(_acknowledgements(layout, client, check=check))
    return outcomes


def _of_node(client: ControllerClient, node: str) -> list[LeaseRecord]:
    """Leases that the controller keeps for this node and that are not released."""
    return [
        record
        for record in client.leases(live=True, timelines=False)
        if any(part.node == node for part in record.lease.allocation.nodes)
    ]


def _owed(records: list[LeaseRecord], node: str) -> list[Generation]:
    """Generations that have ended, and of which this node has yet to say that it holds nothing."""
    return [
        record.lease.generation
        for record in records
        if record.lease.state is LeaseState.ENDING
        and node in record.taken
        and node not in record.acknowledged
    ]


def _repair(finding: audit.NodeFinding, *, check: bool) -> RepairResult:
    if check:
        return RepairResult(finding.kind, finding.what, repaired=False)
    try:
        finding.repair()
    except (VhpcError, OSError) as err:
        line = err.line() if isinstance(err, VhpcError) else str(err)
        return RepairResult(finding.kind, finding.what, repaired=False, error=line)
    return RepairResult(finding.kind, finding.what, repaired=True)


def _acknowledgements(layout: Layout, client: ControllerClient, *, check: bool) -> list[RepairResult]:
    waiting = audit.waiting(layout)
    if not waiting:
        return []
    what = f"{waiting} acknowledgements wait for vhpcd"
    if check:
        return [RepairResult("outbox", what, repaired=False)]
    left = outbox.flush(layout.outbox, client.acknowledge)
    return [RepairResult("outbox", what, repaired=left == 0, error="vhpcd cannot be reached" if left else "")]


def run(config: Config) -> int:
    """The health check: repair, and drain the node for what cannot be repaired."""
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
    bad = []
    for outcome in reconcile(config, node, check=False):
        common.log.warning("%s: %s%s", outcome.kind, outcome.what, " (repaired)" if outcome.repaired else "")
        if not outcome.repaired and outcome.kind not in ("controller", "outbox", lost_jobs.KIND):
            bad.append(outcome)
    if bad:
        common.drain(config, node, TeardownError(bad[0].what, bad[0].error, "vhpc reconcile"))
        return 1
    return 0


def entry() -> int:
    """Process entry point."""
    return common.main("reconcile", run)


if __name__ == "__main__":
    sys.exit(entry())
