# SPDX-License-Identifier: Apache-2.0
"""The ready barrier: real vhpcd without its process, and guests that are reached as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from controller_lab import Alone, allocation, identity, request, wait_for
from hypothesis import given
from hypothesis import strategies as st
from network_lab import lease_of, running_of

from pace import limit
from vhpc_slurm.config import Config, Guests
from vhpc_slurm.config.network import Network
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.assembly import assemble
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.wire_types import ReadyState
from vhpc_slurm.errors import FabricError, NodeError, UserError, VhpcError
from vhpc_slurm.fabric.backend import NoNetwork
from vhpc_slurm.hooks import barrier
from vhpc_slurm.model import Generation, Lease, RunningNode
from vhpc_slurm.node.guest.channel import ChannelError, ChannelRefusedError, GuestChannel
from vhpc_slurm.node.guest.peers import Reached
from vhpc_slurm.node.network.plan import reach_targets
from vhpc_slurm.node.store.journal import Stopped
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.slurm import connect

JOB = Network(allowed=("none", "job"), default="job", vni_first=5000, vni_last=5099)
WAIT_S = 60.0


@dataclass
class Site:
    """vhpcd in this process, and what is true of the guests of its job.

    Attributes:
        ready: nodes whose guests answer.
        cut: pairs of addresses that do not reach each other, in either direction.
        sent: nodes by the requests that they sent, in order.
        silent: vhpcd does not answer.
    """

    config: Config
    loop: asyncio.AbstractEventLoop
    alone: Alone
    requests: Any
    lease: Lease
    ready: set[str]
    cut: set[frozenset[str]] = field(default_factory=set)
    sent: list[tuple[str, str]] = field(default_factory=list)
    silent: bool = False
    error: VhpcError | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, body: wire.Request) -> Any:
        answer = asyncio.run_coroutine_threadsafe(self.requests.answer(body), self.loop).result(WAIT_S)
        if isinstance(answer, wire.Failure):
            raise FabricError(answer.what, answer.why)
        return answer

    def begin(self, job_id: int, *nodes: str, restart: int = 0) -> None:
        """Make the job's lease."""

        async def opened() -> Lease:
            run = self.alone.open
            asked = request(job_id, restart)
            record = await asyncio.get_running_loop().run_in_executor(
                None, run, asked, allocation(*nodes), identity(0)
            )
            return record.lease

        self.lease = asyncio.run_coroutine_threadsafe(opened(), self.loop).result(WAIT_S)
        assert self.lease.segment is not None
        self.ready = set(nodes)

    def client(self) -> ControllerClient:
        def ready(generation: Generation, node: str, state: Any, **more: Any) -> ReadyState:
            with self.lock:
                self.sent.append((node, state))
            if self.silent:
                raise FabricError("vhpcd does not answer")
            kind, line = more.pop("error", ("", ""))
            body = wire.ReportReady(
                generation=str(generation), node=node, state=state, kind=kind, line=line, **more
            )
            return cast(ReadyState, self.ask(body))

        return cast(ControllerClient, SimpleNamespace(ready=ready))

    def node(self, node: str) -> RunningNode:
        return running_of(self.lease, node)

    def wait(self, node: str) -> None:
        """Do the part of a node's Prolog when its guests are set up."""
        barrier.wait(Layout(self.config), self.client(), self.lease, self.node(node))

    def reach(
        self, channel: Any, addresses: Sequence[str], mtu: int, wait_s: float, timeout_s: float
    ) -> Reached:
        """The answer of a guest; ``channel`` is that guest."""
        if self.error is not None:
            raise self.error
        nodes = {
            address: peer.node
            for node in {part.node for part in self.lease.allocation.nodes}
            for guest in self.node(node).guests
            for peer in reach_targets(self.lease, node, guest.plan.index)
            for address in peer.addresses
        }
        mine = channel.plan.interface
        own = {text.partition("/")[0] for text in (mine.ipv4, mine.ipv6)}
        until = time.monotonic() + limit(wait_s)
        while True:
            lost = tuple(
                address
                for address in addresses
                if nodes[address] not in self.ready or any({address, one} in self.cut for one in own)
            )
            if not lost or time.monotonic() >= until:
                return Reached(lost, ", ".join(f"{address}: no answer" for address in lost))
            time.sleep(0.01)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    config = Config(network=msgspec.structs.replace(JOB, ready_timeout_s=20, reach_timeout_s=1))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    store = SqliteStore(tmp_path / "leases")
    alone = Alone(store, NoNetwork(), reserve_mib=0, job_network=JOB)

    async def made() -> Any:
        return assemble(config, alone.leases, NoNetwork(), connect(config))

    vhpcd = asyncio.run_coroutine_threadsafe(made(), loop).result(WAIT_S)
    found = Site(config, loop, alone, vhpcd.requests, cast(Lease, None), set())
    found.begin(42, "n1", "n2", "n3")
    for name, value in (("REPORT_S", 0.05), ("ASK_S", 0.1), ("PAUSE_S", 0.05)):
        monkeypatch.setattr(barrier, name, value)
    plans = threading.local()

    def channel(path: Path, _timeout_s: float) -> Any:
        return contextlib.nullcontext(plans.guest)

    test = barrier._Barrier._test

    def noting(self: Any, guest: Any, peers: Any) -> None:
        plans.guest = guest
        test(self, guest, peers)

    monkeypatch.setattr(barrier._Barrier, "_test", noting)
    monkeypatch.setattr(GuestChannel, "connect", channel)
    monkeypatch.setattr(barrier, "reach", found.reach)
    yield found
    loop.call_soon_threadsafe(vhpcd.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    store.close()


@contextlib.contextmanager
def prologs(site: Site, *nodes: str) -> Iterator[dict[str, Future[None]]]:
    with ThreadPoolExecutor(len(nodes)) as pool:
        yield {node: pool.submit(site.wait, node) for node in nodes}


def impatient(site: Site, **seconds: float) -> None:
    network = msgspec.structs.replace(site.config.network, **seconds)
    site.config = msgspec.structs.replace(site.config, network=network)


# --- which guests are tested ----------------------------------------------------------------------------


@pytest.mark.promise("net.messages")
@given(st.integers(1, 9), st.integers(1, 3))
def test_the_tests_of_all_guests_are_a_ring_and_a_star(count: int, each: int) -> None:
    nodes = [f"n{number}" for number in range(1, count + 1)]
    lease = lease_of(1, 5000, *nodes, each=each)
    names = lease.allocation.guests(each)
    seen = {
        names[place * each + index]: [peer.hostname for peer in reach_targets(lease, node, index)]
        for place, node in enumerate(nodes)
        for index in range(each)
    }
    assert all(len(tested) <= 2 and own not in tested for own, tested in seen.items())
    if len(names) > 1:
        assert all(names[(rank + 1) % len(names)] in seen[own] for rank, own in enumerate(names)), "a ring"
        assert all(names[0] in seen[own] for own in names[1:]), "a star"
    for node in nodes:
        for index in range(each):
            for peer in reach_targets(lease, node, index):
                rank = names.index(peer.hostname)
                assert peer.node == nodes[rank // each]
                assert peer.addresses == (f"10.200.0.{rank + 1}", f"fd76:6870:6300::{rank + 1:x}")


# --- a job that starts ----------------------------------------------------------------------------------


def test_the_first_node_ends_when_all_have_passed(site: Site) -> None:
    with prologs(site, "n1", "n2") as ended:
        ended["n2"].result(WAIT_S)  # it tests n3 and n1, which answer
        time.sleep(0.5)
        assert not ended["n1"].done(), "n3 has not reported"
        site.wait("n3")
        ended["n1"].result(WAIT_S)
    assert [state for node, state in site.sent if node == "n2"] == ["passed"]


def test_a_node_waits_for_guests_that_boot_longer(site: Site) -> None:
    site.ready -= {"n3"}
    with prologs(site, "n1", "n2") as ended:
        wait_for(lambda: ("n2", "waiting") in site.sent, "n2 says nothing")
        time.sleep(0.5)
        assert not any(one.done() for one in ended.values())
        site.ready.add("n3")
        site.wait("n3")
        for one in ended.values():
            one.result(WAIT_S)


@pytest.mark.promise("net.messages")
@pytest.mark.long
def test_a_job_of_a_thousand_nodes_costs_a_thousand_messages(site: Site) -> None:
    nodes = [f"n{number}" for number in range(1, 1001)]
    site.begin(43, *nodes)
    names = site.lease.allocation.guests(1)
    tested: list[int] = []

    def reach(_channel: Any, addresses: Sequence[str], *_: Any) -> Reached:
        tested.append(len(addresses))
        return Reached(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(barrier, "reach", reach)
        with ThreadPoolExecutor(32) as pool:
            for _ in pool.map(site.wait, reversed(nodes)):
                pass
    assert len(names) == len(site.sent) == 1000
    assert max(tested) == 4, "two addresses of two guests"


@pytest.mark.promise("check.before")
@pytest.mark.parametrize("network", [True, False])
def test_a_node_has_passed_when_its_guests_were_checked(site: Site, network: bool) -> None:
    """Then no script starts on any node before all checks are over."""
    site.config = msgspec.structs.replace(site.config, guests=Guests(check=("/usr/bin/check",)))
    layout, go = Layout(site.config), threading.Event()
    lease = site.lease if network else replace(site.lease, segment=None)
    running = [site.node(node) for node in ("n1", "n2", "n3")]
    checks: list[Any] = [lambda: None, lambda: None, lambda: go.wait(WAIT_S)]
    with ThreadPoolExecutor(3) as pool:
        starts = zip(running, checks, strict=True)
        n1, n2, n3 = (pool.submit(barrier.wait, layout, site.client(), lease, *start) for start in starts)
        n2.result(WAIT_S)
        time.sleep(0.5)
        assert not n1.done()
        assert ("n3", "passed") not in site.sent
        go.set()
        assert n1.result(WAIT_S) is n3.result(WAIT_S) is None


def test_a_job_of_one_node_sends_vhpcd_no_request(site: Site) -> None:
    site.begin(44, "n1")
    site.wait("n1")
    assert site.sent == []


# --- a job that cannot start ----------------------------------------------------------------------------


def test_guests_that_do_not_reach_each_other_are_named(site: Site) -> None:
    impatient(site, reach_timeout_s=0)
    site.cut.add(frozenset({"10.200.0.2", "10.200.0.3"}))
    with prologs(site, "n1", "n2", "n3") as ended:
        with pytest.raises(FabricError) as seen:
            ended["n2"].result(WAIT_S)
        line = seen.value.line()
        assert "guest n2 on n2 does not reach guest n3 on n3 with packets of 1450 bytes" in line
        assert "10.200.0.3: no answer" in line
        assert "UDP port 7634 between 192.0.2.11 and 192.0.2.12" in line
        ended["n3"].result(WAIT_S)  # it tests n1 only
        assert not ended["n1"].done(), "n2 ends the job"
        site.ask(wire.Ending(job_id=42, restart=0))
        with pytest.raises(Stopped):
            ended["n1"].result(WAIT_S)


def test_a_node_that_is_not_ready_is_named(site: Site) -> None:
    impatient(site, ready_timeout_s=0)
    site.ready -= {"n3"}
    with prologs(site, "n1", "n2") as ended:
        with pytest.raises(FabricError, match="the guests of node n3 are not ready: waited for 0 s"):
            ended["n2"].result(WAIT_S)
        with pytest.raises(FabricError, match="the guests of nodes n2, n3 are not ready"):
            ended["n1"].result(WAIT_S)


@pytest.mark.promise("net.barrier-fails")
def test_a_network_that_stays_broken_fails_the_job_in_the_end(site: Site) -> None:
    site.cut.add(frozenset({"fd76:6870:6300::2", "fd76:6870:6300::3"}))
    impatient(site, reach_timeout_s=0)
    kinds: list[type[VhpcError]] = []
    for restart in range(3):
        if restart:
            site.ask(wire.Ending(job_id=42, restart=None))
            site.begin(42, "n1", "n2", "n3", restart=restart)
        with prologs(site, "n2", "n3") as ended:
            ended["n3"].result(WAIT_S)
            with pytest.raises(VhpcError) as seen:
                ended["n2"].result(WAIT_S)
        kinds.append(type(seen.value))
    assert kinds == [FabricError, FabricError, UserError]
    assert "the job was requeued 2 times before" in seen.value.line()


def test_an_error_of_the_user_is_reported_on_the_first_node(site: Site) -> None:
    site.ready -= {"n3"}
    with prologs(site, "n1", "n2") as ended:
        error = UserError("image tiny:1 did not boot on n3")
        barrier.report_failure(site.config, site.client(), site.lease, "n3", error, error.line())
        for node in ("n1", "n2"):
            with pytest.raises(barrier.PeerFailedError, match="node n3: image tiny:1 did not boot on n3"):
                ended[node].result(WAIT_S)
    sent = len(site.sent)
    barrier.report_failure(
        site.config, site.client(), site.lease, "n1", barrier.PeerFailedError("node n3"), "x"
    )
    assert len(site.sent) == sent, "one node's error is reported once"


def test_the_end_of_the_job_ends_the_wait(site: Site) -> None:
    site.ready -= {"n3"}
    with prologs(site, "n1", "n2") as ended:
        wait_for(lambda: {node for node, _ in site.sent} >= {"n1", "n2"}, "a node says nothing")
        site.ask(wire.Ending(job_id=42, restart=0))
        for one in ended.values():
            with pytest.raises(Stopped):
                one.result(WAIT_S)


def test_a_node_waits_for_a_vhpcd_that_is_away_for_a_while(site: Site) -> None:
    site.silent = True
    with prologs(site, "n1", "n2", "n3") as ended:
        time.sleep(0.4)
        assert not any(one.done() for one in ended.values())
        site.silent = False
        for one in ended.values():
            one.result(WAIT_S)
    impatient(site, ready_timeout_s=0)
    site.silent = True
    with pytest.raises(FabricError, match="vhpcd did not answer"):
        site.wait("n2")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ChannelRefusedError("reach failed", errno.ENOSYS, "operation 9 is unknown"), "rebuild the image"),
        (ChannelError("the guest's channel is closed"), "guest n2 does not answer its node any more"),
        (NodeError("cannot connect to root.sock"), "guest n2 does not answer its node any more"),
    ],
)
def test_a_guest_that_does_not_test_fails_its_job(site: Site, error: VhpcError, says: str) -> None:
    site.error = error
    with pytest.raises(UserError, match=says):
        site.wait("n2")


def test_guests_of_one_node_that_drop_packets_fail_their_job(site: Site) -> None:
    site.lease = lease_of(45, 5001, "n1", each=2)
    site.ready = {"n1"}
    site.wait("n1")
    site.cut.add(frozenset({"10.200.0.1", "10.200.0.2"}))
    with pytest.raises(UserError, match="does the image drop ICMP echo requests"):
        site.wait("n1")
    assert site.sent == []


def test_reports_of_other_nodes_are_refused(site: Site) -> None:
    with pytest.raises(FabricError, match="no part on node n9"):
        site.client().ready(site.lease.generation, "n9", "passed")
    state = site.client().ready(Generation(42, 7, "0badcafe"), "n1", "passed")
    assert state.over
