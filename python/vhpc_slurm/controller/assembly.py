# SPDX-License-Identifier: Apache-2.0
"""The layers of vhpcd put together: which object has which other, and in which order they are closed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vhpc_slurm.config import Config
from vhpc_slurm.controller.api.changes import Changes, of_cluster
from vhpc_slurm.controller.api.checkpointing import Checkpointing
from vhpc_slurm.controller.api.clustering import Clustering
from vhpc_slurm.controller.api.operating import Operating
from vhpc_slurm.controller.api.requests import Requests
from vhpc_slurm.controller.api.starting import Locate, Starting
from vhpc_slurm.controller.leases.executor import LeaseExecutor
from vhpc_slurm.controller.leases.layer import LeaseLayer
from vhpc_slurm.controller.periodic import Reconciler
from vhpc_slurm.controller.store import choice
from vhpc_slurm.controller.store.writer import Writer
from vhpc_slurm.controller.sync.audit import FabricAudit
from vhpc_slurm.controller.sync.audit_trigger import AuditTrigger
from vhpc_slurm.controller.sync.batch import FabricBatches
from vhpc_slurm.controller.sync.isolation import IsolationWatch
from vhpc_slurm.controller.sync.scheduler import BatchScheduler, FabricThread
from vhpc_slurm.controller.timed import TimedCheckpoints
from vhpc_slurm.fabric.backend import NetworkBackend
from vhpc_slurm.slurm.port import Slurm


@dataclass(frozen=True)
class Assembly:
    """A vhpcd without sockets; belongs to the event loop.

    Attributes:
        requests: answers requests.
        clusters: is told of silent nodes.
        reconciler: compares leases with Slurm.
        timed: begins checkpoints at the time for them.
        audit: looks at the fabric, in ``thread``.
        trigger: says when the next audit is due.
        thread: the fabric thread.
        scheduler: runs batches in ``thread``.
        executor: the database thread, and threads for what blocks.
    """

    requests: Requests
    clusters: Clustering
    reconciler: Reconciler
    timed: TimedCheckpoints
    audit: FabricAudit
    trigger: AuditTrigger
    thread: FabricThread
    scheduler: BatchScheduler
    executor: LeaseExecutor

    def close(self) -> None:
        """Wait for what runs, and end the threads: first the fabric's, which still writes to the database."""
        self.trigger.close()
        self.scheduler.close()
        self.thread.close()
        self.executor.close()


async def no_addresses(_nodes: Iterable[str]) -> Mapping[str, str]:
    """The addresses of nodes for a vhpcd that knows none."""
    return {}


def assemble(
    config: Config,
    leases: LeaseLayer,
    network: NetworkBackend,
    slurm: Slurm,
    writer: Writer | None = None,
    locate: Locate = no_addresses,
) -> Assembly:
    """The layers over a store; without ``writer`` there is a new one, and ``close`` ends either.

    ``locate`` returns the addresses of nodes for job networks.
    """
    writer = writer or Writer(leases.store)
    fabric, settings = config.fabric, config.controller
    watch = IsolationWatch(fabric.open_deadline_s, fabric.unread_deadline_s)
    batches = FabricBatches(leases.batches, network, writer.submit)
    audit = FabricAudit(batches, leases.batches, network, watch, writer.submit)
    thread = FabricThread()
    trigger = AuditTrigger(network, thread)
    scheduler = BatchScheduler(
        batches,
        thread,
        interval_s=fabric.sweep_interval_s,
        # Sooner than the client gives up, so that it receives the reason.
        deadline_s=max(1.0, settings.request_timeout_s - 1.0),
        changed=trigger.changed,
    )
    changes = Changes()

    def changed() -> None:
        for serial in leases.store.clusters.take_changed():
            changes.notify(of_cluster(serial))

    executor = LeaseExecutor(writer, leases.lifecycle, scheduler, changed)
    starting = Starting(leases, executor, scheduler, watch, config, locate, slurm, changes)
    checkpoints = Checkpointing(leases, executor, slurm, changes)
    timed = TimedCheckpoints(config, slurm, leases, executor, checkpoints.save)
    operating = Operating(leases.operator, executor, batches, thread)
    clusters = Clustering(leases, executor, changes, config.policy)
    return Assembly(
        requests=Requests(
            leases,
            executor,
            starting,
            operating,
            checkpoints,
            clusters,
            watch,
            choice.name(config),
            standbys=bool(settings.backup_hosts),
        ),
        clusters=clusters,
        reconciler=Reconciler(settings, slurm, leases, executor, scheduler, starting.notify, checkpoints.run),
        timed=timed,
        audit=audit,
        trigger=trigger,
        thread=thread,
        scheduler=scheduler,
        executor=executor,
    )
