# SPDX-License-Identifier: Apache-2.0
"""The objects of this layer, put together over one store."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vhpc_slurm.config import Config
from vhpc_slurm.controller.leases.batches import LeaseBatches
from vhpc_slurm.controller.leases.checkpoint_quota import CheckpointQuota
from vhpc_slurm.controller.leases.checkpoint_removal import CheckpointRemoval
from vhpc_slurm.controller.leases.checkpoints import CheckpointLedger
from vhpc_slurm.controller.leases.clusters import Clusters
from vhpc_slurm.controller.leases.lifecycle import Lifecycle
from vhpc_slurm.controller.leases.nodes import NodeReports
from vhpc_slurm.controller.leases.opening import LeaseOpening
from vhpc_slurm.controller.leases.operator import OperatorActions
from vhpc_slurm.controller.leases.queries import LeaseQueries
from vhpc_slurm.controller.leases.readiness import Readiness
from vhpc_slurm.controller.leases.settling import Settling

if TYPE_CHECKING:
    from vhpc_slurm.controller.store.port import LeaseStore
    from vhpc_slurm.fabric.backend import NetworkBackend


@dataclass(frozen=True)
class LeaseLayer:
    """Each part has one kind of caller; all are for the database thread only.

    Attributes:
        store: the database.
        lifecycle: state changes of leases and keys.
        opening: for PrologSlurmctld.
        nodes: for Prolog and Epilog.
        readiness: for Prologs of jobs with a network.
        operator: for ``vhpc fabric``.
        batches: the ledger of ``controller.sync``.
        settling: for the periodic task.
        queries: for lists.
        checkpoints: for keepers, and for users who save jobs.
        quota: the room that the policy leaves for checkpoints.
        removal: for users who delete checkpoints, and for the periodic task.
        clusters: for followers, and for users.
    """

    store: LeaseStore
    lifecycle: Lifecycle
    opening: LeaseOpening
    nodes: NodeReports
    readiness: Readiness
    operator: OperatorActions
    batches: LeaseBatches
    settling: Settling
    queries: LeaseQueries
    checkpoints: CheckpointLedger
    quota: CheckpointQuota
    removal: CheckpointRemoval
    clusters: Clusters


def build(
    store: LeaseStore,
    network: NetworkBackend,
    config: Config,
    *,
    clock: Callable[[], float] = time.time,
    steady: Callable[[], float] = time.monotonic,
) -> LeaseLayer:
    """The layer over a store; ``clock`` is the wall clock, ``steady`` a clock that never jumps."""
    fabric = config.fabric
    lifecycle = Lifecycle(
        store,
        quarantine_s=fabric.quarantine_s,
        segment_quarantine_s=config.network.quarantine_s,
        clock=clock,
        steady=steady,
    )
    removal = CheckpointRemoval(store, clock=clock, max_age_days=config.checkpoint.max_age_days)
    quota = CheckpointQuota(store, removal, config.policy)
    clusters = Clusters(store, config.network, clock, config.policy)
    return LeaseLayer(
        store=store,
        lifecycle=lifecycle,
        opening=LeaseOpening(store, lifecycle, network, config, clusters, clock),
        nodes=NodeReports(store, lifecycle, clock),
        readiness=Readiness(store, clusters),
        operator=OperatorActions(store, lifecycle, clock),
        batches=LeaseBatches(store, lifecycle),
        settling=Settling(store, lifecycle, lost_after_s=fabric.lost_after_s, steady=steady),
        queries=LeaseQueries(store, clock),
        checkpoints=CheckpointLedger(
            store,
            removal,
            quota,
            clock=clock,
            steady=steady,
            config=config,
        ),
        quota=quota,
        removal=removal,
        clusters=clusters,
    )
