# SPDX-License-Identifier: Apache-2.0
"""The ready barrier of a job with a network: which nodes have passed, and whether one has failed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vhpc_slurm.controller.wire_types import NodeFailure, NodeState, ReadyState
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import Generation, Lease, LeaseState

if TYPE_CHECKING:
    from vhpc_slurm.controller.leases.clusters import Clusters
    from vhpc_slurm.controller.store.port import LeaseStore

log = logging.getLogger("vhpcd")

USABLE = (LeaseState.RESERVED, LeaseState.READY)
NAMED = 8
"""Most missing nodes that are named."""


@dataclass(frozen=True)
class Reported:
    """A report that is stored: JobIds of all components in the barrier, and the number of their cluster."""

    jobs: tuple[int, ...] = ()
    cluster: int | None = None


class Readiness:
    """Reports and their sum; for the database thread only."""

    def __init__(self, store: LeaseStore, clusters: Clusters) -> None:
        """``clusters`` are told of jobs that are ready."""
        self._store = store
        self._clusters = clusters

    def report(self, generation: Generation, node: str, state: NodeState, kind: str, line: str) -> Reported:
        """Store a node's report; a generation that is over changes nothing.

        Raises:
            FabricError: the job has no part on that node.
        """
        lease = self._current(generation)
        if lease is None:
            return Reported()
        if node not in lease.allocation.node_names:
            raise FabricError(f"lease {generation} has no part on node {node[:80]}")
        with self._store.transaction():
            self._store.readiness.report(generation, node, state, kind, line)
            if state == "passed" and lease.cluster is not None and self._missing(lease) == 0:
                self._clusters.join(lease)
        if state == "failed":
            log.warning("%s on %s is not ready: %s", generation, node, line)
        cluster = None if lease.cluster is None else lease.cluster.serial
        return Reported(tuple(part.generation.job_id for part in lease.parts), cluster)

    def look(self, generation: Generation, about: Iterable[str], *, named: bool) -> ReadyState:
        """The state now; ``about`` are nodes of interest, ``named`` asks for names of missing nodes."""
        lease = self._current(generation)
        if lease is None:
            return ReadyState(over=True)
        known, generations = self._store.readiness, [part.generation for part in lease.parts]
        nodes = lease.segment_nodes
        missing = self._missing(lease)
        names: list[str] = []
        if named and missing:
            passed = {node for one in generations for node in known.nodes_passed(one)}
            names = [node for node in nodes if node not in passed]
        asked = tuple(about)
        joined = lease.cluster is not None and not missing
        unaware, first_unaware = self._clusters.unaware(lease, named=named) if joined else (0, ())
        failures = (known.failure(one) for one in generations)
        return ReadyState(
            over=False,
            missing=missing,
            first_missing=tuple(names[:NAMED]),
            reported=tuple(sorted({node for one in generations for node in known.reported(one, asked)})),
            failure=_worst([*failures, self._ended(lease)]),
            failed_starts=max(known.failed_starts(one.job_id) for one in generations),
            unaware=unaware,
            first_unaware=first_unaware,
        )

    def _missing(self, lease: Lease) -> int:
        """How many nodes have not passed."""
        passed = (self._store.readiness.passed(part.generation) for part in lease.parts)
        return len(lease.segment_nodes) - sum(passed)

    def _ended(self, lease: Lease) -> NodeFailure | None:
        """The failure of a component that has ended before its job has started."""
        for part in lease.parts:
            if part.generation != lease.generation and self._current(part.generation, USABLE) is None:
                line = f"component {part.generation.job_id} of the heterogeneous job has ended"
                return NodeFailure(node=part.nodes[0], kind=UserError.kind, line=line)
        return None

    def _current(
        self, generation: Generation, states: Collection[LeaseState] = (LeaseState.READY,)
    ) -> Lease | None:
        """The lease of a generation; None when it is in another state or not the job's newest."""
        record = self._store.newest(generation.job_id)
        if record is None or record.lease.generation != generation:
            return None
        return record.lease if record.lease.state in states else None


def _worst(failures: Iterable[NodeFailure | None]) -> NodeFailure | None:
    """The first failure that fails the job, else the first that requeues it."""
    found = [failure for failure in failures if failure is not None]
    return next((failure for failure in found if failure.kind == UserError.kind), found[0] if found else None)
