# SPDX-License-Identifier: Apache-2.0
"""Two members of a cluster with a real vhpcd: their followers, and the barrier of the one that joins."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from controller_lab import Alone, allocation, identity, request
from network_lab import running_of

from pace import until
from vhpc_slurm.config import Config
from vhpc_slurm.config.network import Network
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.cluster_messages import AskRoster
from vhpc_slurm.controller.assembly import assemble
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.backend import NoNetwork
from vhpc_slurm.hooks import barrier, following
from vhpc_slurm.hooks.followerport import Setting
from vhpc_slurm.hooks.following import Follower
from vhpc_slurm.model import Generation, Lease, Roster
from vhpc_slurm.node.boot import follower
from vhpc_slurm.node.guest.channel import GuestChannel
from vhpc_slurm.node.guest.peers import Reached
from vhpc_slurm.node.network import plan
from vhpc_slurm.node.store import membership
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.membership import Membership
from vhpc_slurm.slurm import connect

JOB = Network(allowed=("none", "job"), vni_first=5000, vni_last=5099, ready_timeout_s=20, reach_timeout_s=20)
WAIT_S = 60.0


@dataclass
class Site:
    """vhpcd in this process, and the nodes with a folder each; ``tested`` are addresses of REACH."""

    folder: Path
    loop: asyncio.AbstractEventLoop
    alone: Alone
    requests: Any
    pool: ThreadPoolExecutor
    tested: list[str] = field(default_factory=list)

    def ask(self, body: wire.Request) -> Any:
        answer = asyncio.run_coroutine_threadsafe(self.requests.answer(body), self.loop).result(WAIT_S)
        if isinstance(answer, wire.Failure):
            raise FabricError(answer.what, answer.why)
        return answer

    def open(self, job_id: int, *nodes: str) -> Lease:
        job = request(job_id, network="job", cluster="mesh")
        return self.alone.open(job, allocation(*nodes), identity(0)).lease

    def ready(self, generation: Generation, node: str, state: Any, **more: Any) -> Any:
        kind, line = more.pop("error", ("", ""))
        body = wire.ReportReady(
            generation=str(generation), node=node, state=state, kind=kind, line=line, **more
        )
        return self.ask(body)

    def reach(self, _channel: object, addresses: Sequence[str], *_: object) -> Reached:
        self.tested += addresses
        return Reached(())


class Node:
    """A node of a member: its follower in a thread, and its Prolog's barrier."""

    def __init__(self, site: Site, lease: Lease, name: str) -> None:
        self.site, self.lease, self.name = site, lease, name
        paths = {key: str(site.folder / name / key) for key in ("state", "run", "log")}
        config = msgspec.structs.replace(msgspec.convert({"paths": paths}, Config), network=JOB)
        self.layout, self.job_id = Layout(config), lease.generation.job_id
        self.layout.job(self.job_id).mkdir(parents=True)
        membership.write(self.layout, self.job_id, follower.of(lease))
        self.ended: tuple[int, ...] = ()
        self.over = threading.Event()

    def follow(self) -> None:
        known = follower.of(self.lease)
        network = SimpleNamespace(follow=self.follow_network)
        work = Follower(Setting(self.lease.generation, self.name), known, self, network, self, self)

        def run() -> None:
            if work.run():
                self.over.set()

        self.site.pool.submit(run)

    def barrier(self) -> Any:
        client = cast(ControllerClient, SimpleNamespace(ready=self.site.ready))
        running = running_of(self.lease, self.name)
        return self.site.pool.submit(barrier.wait, self.layout, client, self.lease, running)

    @property
    def others(self) -> dict[int, tuple[int, ...]]:
        """Jobs of other members that its network knows, with the guests that have ended."""
        known = membership.read(self.layout, self.job_id)
        assert known is not None
        return {one.generation.job_id: one.gone for one in known.others}

    # --- for the follower -------------------------------------------------------

    def roster(
        self, generation: Generation, node: str, applied: int, gone: tuple[int, ...], wait_s: float
    ) -> Roster:
        body = AskRoster(generation=str(generation), node=node, applied=applied, gone=gone, wait_s=wait_s)
        return cast(Roster, self.site.ask(body).roster)

    def follow_network(self, known: Membership) -> None:
        membership.write(self.layout, self.job_id, known)

    def all(self) -> tuple[int, ...]:
        return ()

    def gone(self) -> tuple[int, ...]:
        return self.ended

    def tell(self, _known: Membership) -> tuple[str, ...]:
        return ()

    def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.05))

    def ask(self, question: Callable[[], Roster]) -> Roster:
        return question()

    def briefly(self, question: Callable[[], Roster], seconds: float) -> None:
        question()

    def job_ends(self) -> bool:
        return False


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    config, store = Config(network=JOB), SqliteStore(tmp_path / "leases")
    alone = Alone(store, NoNetwork(), reserve_mib=0, job_network=JOB)

    async def made() -> Any:
        return assemble(config, alone.leases, NoNetwork(), connect(config))

    vhpcd = asyncio.run_coroutine_threadsafe(made(), loop).result(WAIT_S)
    monkeypatch.setattr(following, "ASK_S", 0.2)
    monkeypatch.setattr(GuestChannel, "connect", lambda *_: contextlib.nullcontext())
    with ThreadPoolExecutor(12) as pool:
        found = Site(tmp_path, loop, alone, vhpcd.requests, pool)
        monkeypatch.setattr(barrier, "reach", found.reach)
        yield found
        for job_id in (42, 43):
            found.ask(wire.Ending(job_id=job_id, restart=0))
    loop.call_soon_threadsafe(vhpcd.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    store.close()


def test_a_member_joins_changes_and_leaves(site: Site) -> None:
    old = site.open(42, "n1")
    n1 = Node(site, old, "n1")
    n1.follow()
    n1.barrier().result(WAIT_S)
    new = site.open(43, "n2", "n3")
    n2, n3 = Node(site, new, "n2"), Node(site, new, "n3")
    n2.follow()
    first, second = n2.barrier(), n3.barrier()
    second.result(WAIT_S)
    time.sleep(0.5)
    assert not first.done(), "the follower of n3 has not answered"
    assert set(site.tested) == {*addresses(new, 0), *addresses(new, 1)}, "of the own job"
    site.tested.clear()
    n3.follow()
    first.result(WAIT_S)
    assert set(site.tested) == set(addresses(old, 0)), "the first node's guest tests the other member"
    assert [node.others for node in (n1, n2, n3)] == [{43: ()}, {42: ()}, {42: ()}]
    n3.ended = (1,)
    until(lambda: n1.others == {43: (1,)}, "n1 does not hear of the guest that has ended")
    site.ask(wire.Ending(job_id=43, restart=0))
    until(lambda: n1.others == {}, "n1 does not hear of the end")
    assert n2.over.wait(WAIT_S)
    assert n3.over.wait(WAIT_S)
    assert not n1.over.is_set()


def addresses(lease: Lease, rank: int) -> tuple[str, str]:
    assert lease.segment is not None
    return plan.addresses(lease.segment, rank)
