# SPDX-License-Identifier: Apache-2.0
"""A vhpcd without sockets whose jobs are saved, and the slurmctld that it asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from checkpoint_rig import CHECKPOINTS, UNDERLAY, nodes, saved
from controller_lab import manifest, publish

from vhpc_slurm.config import Config
from vhpc_slurm.config.images import Images
from vhpc_slurm.controller import wire_types
from vhpc_slurm.controller.api import checkpoint_messages as messages
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.useraccess import UserAccess
from vhpc_slurm.controller.assembly import Assembly, assemble
from vhpc_slurm.controller.leases import layer
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.backend import NoNetwork
from vhpc_slurm.model import (
    Allocation,
    Generation,
    JobRequest,
    KeeperReport,
    KeeperState,
    OrderKind,
    Viewer,
)
from vhpc_slurm.slurm.port import (
    JobStatus,
    NodeResources,
    NoSuchJobError,
    NotRequeueableError,
    RunningJob,
    Slurm,
    SlurmError,
    SlurmJob,
    Standing,
)

T = TypeVar("T")
K = KeeperState
ALICE, BOB, ROOT = 2001, 2002, None


class Ctld:
    """slurmctld's answers about its jobs, and the jobs that it has been told to end."""

    def __init__(self) -> None:
        self.job = SlurmJob(
            7, 0, "RUNNING", "None", ALICE, ALICE, "alice", "all", "job", "/", "", nodes(), batch_host="n1"
        )
        self.known, self.down = True, False
        self.cancelled: list[int] = []
        self.requeued: list[int] = []
        self.signalled: list[int] = []
        self.may = self.requeueable = True
        self.times: tuple[RunningJob, ...] | None = ()
        self.listed: tuple[JobStatus, ...] = ()
        self.associations: dict[str, tuple[str, ...]] | None = {}

    def load(self, job_id: int) -> SlurmJob:
        if not self.known:
            raise NoSuchJobError("no such job")
        return replace(self.job, job_id=job_id)

    def cancel(self, job_id: int) -> None:
        self.cancelled.append(job_id)
        if self.down:
            raise FabricError("scancel failed")

    def node_resources(self) -> tuple[NodeResources, ...]:
        return ()

    def may_requeue(self, job_id: int) -> bool:
        return self.may

    def requeue(self, job_id: int) -> None:
        if not self.requeueable:
            raise NotRequeueableError("scontrol requeue failed")
        self.requeued.append(job_id)

    def end_script(self, job_id: int) -> None:
        self.signalled.append(job_id)

    def running(self) -> tuple[RunningJob, ...]:
        assert self.times is not None
        return self.times

    def jobs(self) -> tuple[JobStatus, ...]:
        return self.listed

    def knows(self, job_id: int) -> bool:
        return self.known

    def standing(self, user: str) -> Standing:
        return Standing()

    def accounts(self, user: str, account: str = "") -> tuple[str, ...]:
        if self.associations is None:
            raise SlurmError("scontrol failed")
        return tuple(one for one in self.associations.get(user, ()) if account in ("", one))


class Vhpcd(SimpleNamespace):
    """vhpcd without sockets."""

    ctld: Ctld
    parts: Assembly
    users: UserAccess
    store: SqliteStore

    async def ask(self, body: wire.Request, uid: int | None = ROOT) -> Any:
        viewer = None if uid is ROOT else Viewer(uid)
        return await self.parts.requests.answer(body, uid or 0, viewer)

    async def open(self, job: JobRequest, allocation: Allocation | None = None) -> Generation:
        answer = await self.ask(opening(job, allocation or nodes()))
        assert isinstance(answer, wire.LeaseAnswer), answer
        return Generation.parse(answer.lease.generation)

    async def keeper(
        self, generation: Generation, node: str, report: KeeperReport | None = None
    ) -> OrderKind:
        body = messages.AskOrder(generation=str(generation), node=node, report=report)
        answer = await self.ask(body)
        assert isinstance(answer, messages.OrderAnswer), answer
        return answer.order.kind

    async def save(
        self, generation: Generation, name: str, *, stop: bool = False, requeue: bool = False
    ) -> int:
        """A job is saved, and its keepers obey."""
        body = messages.SaveJob(job_id=generation.job_id, name=name, stop=stop, requeue=requeue)
        answer = await self.ask(body, ALICE)
        assert isinstance(answer, messages.CheckpointAnswer), answer
        serial = answer.checkpoint.serial
        for rank, node in enumerate(("n1", "n2")):
            await self.keeper(generation, node, KeeperReport(serial, K.PREPARED))
            await self.keeper(generation, node, KeeperReport(serial, K.HELD))
            del rank
        for rank, node in enumerate(("n1", "n2")):
            await self.keeper(generation, node, KeeperReport(serial, K.SAVED, saved(node, rank)))
        return serial


def opening(job: JobRequest, allocation: Allocation) -> wire.OpenGeneration:
    return wire.OpenGeneration(request=job, node_groups=wire_types.pack_allocation(allocation))


def run(tmp_path: Any, test: Callable[[Vhpcd], Awaitable[T]], **tables: Any) -> T:
    """Run a test with a vhpcd whose catalogue has an image."""
    publish(tmp_path, manifest())

    async def bounded() -> T:
        config = Config(images=Images(catalog=str(tmp_path)), **{"checkpoint": CHECKPOINTS, **tables})
        store, ctld = SqliteStore(":memory:"), Ctld()

        async def locate(_nodes: Any) -> dict[str, str]:
            return UNDERLAY

        leases = layer.build(store, NoNetwork(), config)
        parts = assemble(config, leases, NoNetwork(), cast(Slurm, ctld), locate=locate)
        users = UserAccess(parts.requests, cast(Slurm, ctld))
        found = Vhpcd(ctld=ctld, parts=parts, users=users, store=store)
        try:
            return await asyncio.wait_for(test(found), 60)
        finally:
            users.close()
            parts.close()
            store.close()

    return asyncio.run(bounded())
