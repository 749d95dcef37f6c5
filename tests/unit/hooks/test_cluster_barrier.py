# SPDX-License-Identifier: Apache-2.0
"""The ready barrier of a job that joins a cluster: all its nodes know the job, and two guests answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from cluster_lab import member_lease
from follower_rig import member, with_gone
from network_lab import running_of

from vhpc_slurm.config import Config
from vhpc_slurm.config.network import Network
from vhpc_slurm.controller import asking
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.wire_types import NodeFailure, ReadyState
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.hooks import barrier, following
from vhpc_slurm.model import ClusterMember, Lease
from vhpc_slurm.node.boot import follower
from vhpc_slurm.node.guest.channel import GuestChannel
from vhpc_slurm.node.guest.peers import Reached
from vhpc_slurm.node.store import membership
from vhpc_slurm.node.store.journal import Stopped
from vhpc_slurm.node.store.layout import Layout

ALONE = member_lease(42, 5042, "n1", first=4)
OLD, MIDDLE, NEW = member(7, "n3", "n4", first=1), member(20, "n5", first=3), member(50, "n6", first=9)
JOINED = ReadyState(over=False)
FOLLOWERS_S = barrier.FOLLOWERS_S


@dataclass
class Start:
    """The Prolog of a job's first node.

    Attributes:
        answers: of vhpcd, the last one again and again.
        said: what vhpcd was told.
        tested: addresses that a guest was asked to reach, for each test.
        deaf: addresses that do not answer.
        meanwhile: what happens during the next tests.
    """

    layout: Layout
    lease: Lease = ALONE
    answers: list[ReadyState] = field(default_factory=lambda: [JOINED])
    said: list[tuple[str, str]] = field(default_factory=list)
    tested: list[set[str]] = field(default_factory=list)
    deaf: set[str] = field(default_factory=set)
    meanwhile: list[Callable[[], object]] = field(default_factory=list)

    def know(self, *others: ClusterMember) -> None:
        """The follower of this node has applied these."""
        membership.write(self.layout, 42, replace(follower.of(self.lease), version=5, others=others))

    def wait(self, node: str = "n1") -> None:
        client = cast(ControllerClient, SimpleNamespace(ready=self.ready))
        barrier.wait(self.layout, client, self.lease, running_of(self.lease, node))

    def ready(self, _generation: object, _node: str, state: str, **more: Any) -> ReadyState:
        self.said.append((state, more.get("error", ("", ""))[1]))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def reach(self, _channel: object, addresses: Sequence[str], *_: object) -> Reached:
        self.tested.append(set(addresses))
        if self.meanwhile:
            self.meanwhile.pop(0)()
        lost = tuple(address for address in addresses if address in self.deaf)
        return Reached(lost, ", ".join(f"{address}: no answer" for address in lost))


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    paths = {name: str(tmp_path / name) for name in ("state", "run", "log")}
    config = msgspec.convert({"paths": paths}, Config)
    network = Network(allowed=("none", "job"), default="job", ready_timeout_s=20, reach_timeout_s=1)
    found = Start(Layout(msgspec.structs.replace(config, network=network)))
    found.layout.job(42).mkdir(parents=True)
    found.know()
    monkeypatch.setattr(barrier, "reach", found.reach)
    monkeypatch.setattr(barrier, "AWARE_S", 0.01)
    monkeypatch.setattr(barrier, "FOLLOWERS_S", 0)
    monkeypatch.setattr(GuestChannel, "connect", lambda *_: contextlib.nullcontext())
    return found


def test_the_first_member_only_reports(start: Start) -> None:
    start.wait()
    assert start.said == [("passed", "")]
    assert start.tested == []


def test_the_first_node_waits_until_the_cluster_knows_the_job(start: Start) -> None:
    unaware = ReadyState(over=False, unaware=2, first_unaware=("n3", "n4"))
    start.answers = [ReadyState(over=False, missing=1), unaware, unaware, JOINED]
    start.wait()
    assert len(start.said) == 4


def test_a_node_that_does_not_take_the_job_in_is_named(start: Start) -> None:
    start.answers = [ReadyState(over=False, unaware=1, first_unaware=("n3 (job 7)",))]
    start.layout = Layout(patient(start.layout.config, 0))
    with pytest.raises(FabricError) as seen:
        start.wait()
    line = "a node of cluster mesh has not taken the job into its network: n3 (job 7): waited for 0 s on n1"
    assert line in seen.value.line()
    assert start.said[-1] == ("failed", seen.value.line()), "other nodes and vhpcd are told"


def test_followers_ask_again_before_a_start_fails() -> None:
    """They notice that vhpcd's host is off, pause, and connect to one that has begun meanwhile."""
    idle_s, interval_s, probes = (value for _, value in asking.KEEPALIVE)
    notice_s = idle_s + interval_s * probes
    assert notice_s + following.AWAY_MOST_S + asking.CONNECT_ALONE_S <= FOLLOWERS_S


def test_it_fails_for_good_after_two_requeues(start: Start) -> None:
    start.answers = [ReadyState(over=False, unaware=1, failed_starts=3)]
    start.layout = Layout(patient(start.layout.config, 0))
    with pytest.raises(UserError, match="the job was requeued 2 times before"):
        start.wait()


def test_other_nodes_of_the_job_do_not_wait_for_the_cluster(start: Start) -> None:
    start.lease = member_lease(42, 5042, "n1", "n2", first=4)
    start.answers = [ReadyState(over=False, unaware=1)]
    start.know(OLD)
    start.wait("n2")
    assert start.tested == [{"10.200.0.5", "fd76:6870:6300::5"}], "the job's own ring and star"


def test_guests_test_the_oldest_and_the_newest_member(start: Start) -> None:
    start.lease = member_lease(42, 5042, "n1", first=4, each=2)
    start.know(with_gone(OLD, 0), MIDDLE, NEW)
    start.wait()
    expected = {"10.200.0.3", "fd76:6870:6300::3", "10.200.0.10", "fd76:6870:6300::a"}
    assert start.tested[-2:] == [expected, expected], "each guest of the first node, after the barrier"


def test_a_member_that_does_not_answer_fails_the_start(start: Start) -> None:
    start.know(OLD, NEW)
    start.deaf = {"10.200.0.10"}
    start.layout = Layout(patient(start.layout.config, 0))
    with pytest.raises(FabricError) as seen:
        start.wait()
    line = seen.value.line()
    assert (
        "guest n1 on n1 does not reach guest n6-j50 of its cluster on n6 with packets of 1450 bytes" in line
    )
    assert "10.200.0.10: no answer" in line
    assert start.said[-1] == ("failed", line)


def test_a_member_that_has_gone_meanwhile_does_not_count(start: Start) -> None:
    start.know(OLD, NEW)
    start.deaf = {"10.200.0.10", "fd76:6870:6300::a"}
    start.meanwhile = [lambda: None, lambda: start.know(OLD)]
    start.wait()
    assert start.tested[1] == start.deaf, "who has answered is not tested again"


def test_the_end_of_the_job_ends_the_wait_for_the_cluster(start: Start) -> None:
    start.answers = [ReadyState(over=False, unaware=1), ReadyState(over=True)]
    with pytest.raises(Stopped):
        start.wait()


def test_own_guests_that_drop_packets_fail_their_job(start: Start) -> None:
    start.lease = member_lease(42, 5042, "n1", first=4, each=2)
    start.deaf = {"10.200.0.6"}
    start.layout = Layout(patient(start.layout.config, 0))
    with pytest.raises(UserError, match="does the image drop ICMP echo requests"):
        start.wait()


def test_a_failure_of_a_member_of_one_node_is_reported(start: Start) -> None:
    client = cast(ControllerClient, SimpleNamespace(ready=start.ready))
    error = UserError("image tiny:1 did not boot")
    barrier.report_failure(Config(), client, start.lease, "n1", error, error.line())
    assert start.said == [("failed", "image tiny:1 did not boot")]
    start.answers = [ReadyState(over=False, failure=NodeFailure(kind="fabric", node="n1", line="x"))]
    start.wait()


def patient(config: Config, seconds: int) -> Config:
    network = msgspec.structs.replace(config.network, reach_timeout_s=seconds)
    return msgspec.structs.replace(config, network=network)
