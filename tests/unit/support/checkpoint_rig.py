# SPDX-License-Identifier: Apache-2.0
"""Jobs that are saved: a store, its layer, and keepers that do what they are told."""

from __future__ import annotations

from typing import Any

from controller_lab import identity, request

from vhpc_slurm.config import Config
from vhpc_slurm.config.checkpoint import Checkpoint
from vhpc_slurm.config.network import Network
from vhpc_slurm.controller.leases import layer
from vhpc_slurm.controller.leases.opening import Wanted
from vhpc_slurm.controller.leases.resuming import merged
from vhpc_slurm.controller.store.checkpoints import StoredCheckpoint
from vhpc_slurm.controller.store.port import LeaseStore
from vhpc_slurm.errors import UserError
from vhpc_slurm.fabric.backend import NoNetwork
from vhpc_slurm.model import (
    CONTINUED,
    Allocation,
    CheckpointState,
    Generation,
    ImageIdentity,
    JobRequest,
    KeeperReport,
    KeeperState,
    Lease,
    NodeAllocation,
    OrderKind,
    SavedGuest,
    SavedNode,
    Seal,
)

NODES = ("n1", "n2")
UNDERLAY = {f"n{number}": f"192.0.2.{number}" for number in range(1, 10)}
CHECKPOINTS = Checkpoint(folder="/ck")
JOB_NETWORK = Network(default="job", allowed=("job", "none"))


def nodes(*names: str, cpus: int = 2, memory_mib: int = 2048) -> Allocation:
    """An allocation without devices."""
    cpu_ids = tuple(range(cpus))
    return Allocation(tuple(NodeAllocation(name, cpu_ids, memory_mib) for name in names or NODES))


def saved(node: str, rank: int, size: int = 4096) -> SavedNode:
    """The part of a node with one guest."""
    return SavedNode(node, 10_000_000, "emulated", 1.5, (SavedGuest(rank, node, 2, 1024, Seal(size, b"r")),))


class Site:
    """vhpcd's layer of leases over a store; tests set its clock, and the bytes that each node saves."""

    def __init__(self, store: LeaseStore, config: Config | None = None) -> None:
        self.store, self.config = store, config or Config(checkpoint=CHECKPOINTS)
        self.now = 1000.0
        self.size = 4096
        self.start()

    def start(self) -> None:
        """Start vhpcd again: what was only in its memory is gone."""
        self.layer = layer.build(
            self.store, NoNetwork(), self.config, clock=lambda: self.now, steady=lambda: self.now
        )
        self.ledger = self.layer.checkpoints

    def open(self, job: JobRequest, allocation: Allocation, image: ImageIdentity | None = None) -> Lease:
        """The lease of a job that boots."""
        wanted = Wanted(job, allocation, image or identity(0))
        return self.layer.opening.reserve_all([wanted], UNDERLAY)[0].lease

    def resume(self, job_id: int, name: str, allocation: Allocation, restart: int = 0, **other: Any) -> Lease:
        """The lease of a job that continues a checkpoint, as ``api.starting`` makes it."""
        job = request(job_id, restart, **({"image": CONTINUED, "resume": name} | other))
        opening = self.layer.opening
        if (record := opening.find(job, allocation)) is not None:
            return record.lease
        found = (opening.own(job, allocation) if restart else None) or opening.resumed(job, allocation)
        if isinstance(found, UserError):
            wanted = Wanted(job, allocation, found)
        else:
            assert found.origin.image is not None
            wanted = Wanted(merged(job, found.origin), allocation, found.origin.image, found)
        return opening.reserve_all([wanted], UNDERLAY)[0].lease

    def end(self, lease: Lease) -> None:
        """The job has ended."""
        self.layer.lifecycle.end_job(lease.generation.job_id, None)

    def say(
        self, generation: Generation, node: str, state: KeeperState | None, serial: int = 0, line: str = ""
    ) -> OrderKind:
        """A request of a keeper, and the order in its answer; guests that are HELD were PREPARED before."""
        if state is KeeperState.HELD and self.store.checkpoints.reported(serial, node) is None:
            self.ledger.ask(generation, node, KeeperReport(serial, KeeperState.PREPARED))
        rank = NODES.index(node)
        what = saved(node, rank, self.size) if state is KeeperState.SAVED else None
        report = None if state is None else KeeperReport(serial, state, what, line)
        self.ledger.ask(generation, node, report)
        return self.ledger.order(generation, report).kind

    def state(self, serial: int) -> CheckpointState:
        """The state of a checkpoint."""
        found = self.store.checkpoints.get(serial)
        assert found is not None
        return found.state

    def save_and_stop(self, job_id: int, name: str) -> Lease:
        """A job whose checkpoint is complete, and that Slurm has not ended yet."""
        lease = self.open(request(job_id), nodes())
        self.save(lease, name, stop=True)
        return lease

    def save(
        self, lease: Lease, name: str = "", *, stop: bool = False, requeue: bool = False
    ) -> StoredCheckpoint:
        """A valid checkpoint of a job, whose keepers obey."""
        made = self.ledger.begin(lease.generation.job_id, name, stop=stop, requeue=requeue, uid=None)
        for state in (KeeperState.HELD, KeeperState.SAVED):
            for node in lease.allocation.node_names:
                self.say(lease.generation, node, state, made.serial)
        assert self.state(made.serial) is CheckpointState.VALID
        for node in lease.allocation.node_names:
            self.say(lease.generation, node, KeeperState.CONTINUED, made.serial)
        return made
