# SPDX-License-Identifier: Apache-2.0
"""Prolog: what each kind of failure leaves on the node, and what Slurm, vhpcd and the user are told."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from boot_rig import GENERATION, NODE, boot_layout
from prolog_rig import Node, booted, prolog_node
from stepd import needs_root

from vhpc_slurm import policy
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, NodeError, TeardownError, UserError, VhpcError
from vhpc_slurm.hooks import barrier, bringup, timelimit
from vhpc_slurm.model import Allocation, Generation, LeaseState, RunningNode, Segment
from vhpc_slurm.node import teardown
from vhpc_slurm.node.boot import permission
from vhpc_slurm.node.boot.state import Boot
from vhpc_slurm.node.devices import quarantine
from vhpc_slurm.node.guest import refusal
from vhpc_slurm.node.resource.image import Image
from vhpc_slurm.node.store import joblock, timeline
from vhpc_slurm.node.store.journal import Journal, Stopped, generations
from vhpc_slurm.reconcile import ended_jobs
from vhpc_slurm.slurm.sacct import AccountedJob, Accounting
from vhpc_slurm.slurm.scontrol import Scontrol

layout, node = boot_layout, prolog_node
pytestmark = needs_root


def test_guests_that_are_ready_are_announced_to_the_plugin(node: Node) -> None:
    assert node.run() == 0
    state = node.state
    assert (state["status"], state["generation"], state["guests"]) == ("ready", str(GENERATION), "1")
    assert state["socket"] == f"{node.layout.run}/jobs/42/g0/run.sock"
    assert node.held == ["rundir", "claim", "image"]
    assert (node.drained, node.requeued) == ([], [])


def test_the_owner_gets_the_place_of_the_guests(node: Node) -> None:
    assert node.run() == 0
    (report,) = node.reports
    assert (report.generation, report.node) == (GENERATION, "n1")
    (guest,) = report.guests
    assert (guest.index, guest.hostname) == (0, "n1")
    # all of the node
    assert guest.cpus == (0, 1, 2, 3)
    assert report.host is not None
    assert report.host.cells == NODE.cells
    assert report.lines == (f"guests run in software emulation (TCG), many times slower: {NODE.kvm_reason}",)


# --- a user's mistake -------------------------------------------------------------------


def test_a_users_mistake_fails_the_job_and_not_the_node(node: Node) -> None:
    node.outcome = UserError("image tiny:1 did not boot on n1", "it wrote nothing to its console")
    assert node.run() == 0
    assert (node.state["status"], node.state["kind"]) == ("failed", "user")
    assert node.state["message"].startswith("image tiny:1 did not boot on n1: it wrote nothing")
    assert "alarm" not in node.state
    assert node.state["message"] in node.reports[0].lines
    # the folder with the state file stays for the plugin, everything else is released
    assert node.held == ["rundir"]
    assert (node.drained, node.requeued) == ([], [])


def test_a_refused_lease_is_the_users_and_takes_nothing(node: Node) -> None:
    node.lease = replace(node.lease, state=LeaseState.REFUSED, image=None, refusal="no image tiny:2")
    assert node.run() == 0
    assert (node.state["status"], node.state["message"]) == ("failed", "no image tiny:2")
    assert node.held == ["rundir"]


def test_a_job_of_another_user_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_UID", "2")
    assert node.run() == 0
    assert node.state["status"] == "failed"
    assert node.held == ["rundir"]


def test_a_guest_refused_by_qemu_is_an_alarm_without_a_drain(node: Node) -> None:
    node.outcome = refusal.RefusedGuestError("n1", "QEMU: no such machine")
    assert node.run() == 0
    assert node.state["alarm"] == "QEMU: no such machine"
    assert node.drained == []


@pytest.mark.promise("policy.node")
def test_an_image_that_the_nodes_policy_refuses_is_an_alarm(node: Node) -> None:
    """Only vhpcd's rules or this node's can be right: operators must know, and no node is drained."""
    rule = Rule(name="gpu")
    node.outcome = permission.RefusedHereError(
        "n1", rule, policy.PolicyError("policy rule 'gpu' does not permit x")
    )
    assert node.run() == 0
    assert (node.state["status"], node.state["kind"]) == ("failed", "user")
    assert node.state["message"].startswith(
        "policy rule 'gpu' does not permit x on n1 (vhpc.toml or the signers"
    )
    assert node.state["alarm"] == "policy rule 'gpu' of the node refuses what vhpcd has permitted"
    assert node.held == ["rundir"]
    assert (node.drained, node.requeued) == ([], [])


# --- this node's fault ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [NodeError, TeardownError])
def test_a_fault_of_the_node_drains_it_and_leaves_nothing(node: Node, kind: type[VhpcError]) -> None:
    node.outcome = kind("libvirt does not answer", "connection refused", "see: systemctl status libvirtd")
    with pytest.raises(kind):
        node.run()
    (reason,) = node.drained
    assert reason.startswith("libvirt does not answer: connection refused")
    assert node.held == []
    assert not node.layout.job(42).exists()
    assert node.requeued == []


def test_unreleased_resources_stay_in_the_journal(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.outcome = NodeError("libvirt does not answer")

    def busy(*_: object) -> None:
        raise TeardownError("the image is in use")

    monkeypatch.setattr(Image, "release", busy)
    with pytest.raises(TeardownError, match="the image is in use"):
        node.run()
    assert node.held == ["image"]
    assert len(node.drained) == 1


# --- neither the user nor the node ------------------------------------------------------


def test_without_vhpcd_the_job_is_requeued(node: Node) -> None:
    node.answers = [FabricError("vhpcd does not answer"), FabricError("vhpcd does not answer")]
    assert node.run() == 0
    assert (node.requeued, node.drained, node.held, node.comments) == ([42], [], [], [])


def test_without_vhpcd_a_job_without_requeue_gets_the_reason(node: Node) -> None:
    node.answers, node.may_requeue = [FabricError("vhpcd does not answer")] * 3, False
    assert node.run() == 0
    assert node.comments == [
        (42, "vhpc: vhpcd does not answer; the job may not be requeued: submit it again")
    ]
    assert (node.requeued, node.drained, node.held) == ([], [], [])


def test_a_resource_still_held_requeues_the_job(node: Node) -> None:
    node.outcome = FabricError("CPUs 0-3 are held by guests of 41.0.0123abcd")
    assert node.run() == 0
    assert (node.requeued, node.drained, node.held) == ([42], [], [])


def test_a_job_that_may_not_be_requeued_fails_with_the_reason(node: Node) -> None:
    node.outcome, node.may_requeue = FabricError("CPUs 0-3 are held by guests of 41.0.0123abcd"), False
    assert node.run() == 0
    assert node.state["status"] == "failed"
    assert node.state["message"] == (
        "CPUs 0-3 are held by guests of 41.0.0123abcd (the job may not be requeued: submit it again)"
    )
    assert (node.drained, node.held) == ([], ["rundir"])


@pytest.mark.parametrize("state", [LeaseState.ENDING, LeaseState.RELEASED])
def test_a_late_prolog_requeues_nothing(node: Node, state: LeaseState) -> None:
    node.answers = [FabricError("the lease is ending"), replace(node.lease, state=state)]
    assert node.run() == 0
    assert (node.requeued, node.drained) == ([], [])


def test_guests_of_ended_jobs_make_room_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    held = FabricError("CPUs 0-3 are held by guests of 41.0.0123abcd")
    tried: list[int] = []

    def reserve(*_: object) -> Any:
        tried.append(len(tried))
        raise held

    monkeypatch.setattr(bringup, "reserve", reserve)
    monkeypatch.setattr(ended_jobs, "clear", lambda *_, **__: True)
    assert node.run() == 0
    assert (tried, node.requeued) == ([0, 1], [42])


# --- the ready barrier ------------------------------------------------------------------

SEGMENT = Segment(5000, "10.200.0.0/16", "fd76:6870:6300::/64", 7634, 0, ("192.0.2.1", "192.0.2.2"))


@pytest.fixture
def two_nodes(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A job of two nodes with a network; the barrier raises the outcome, and what vhpcd is told is noted."""
    first = node.lease.allocation.nodes[0]
    pair = Allocation((first, replace(first, node="n2")))
    node.lease = replace(node.lease, allocation=pair, segment=SEGMENT)
    told: list[tuple[str, str, tuple[str, str]]] = []

    def ready(_client: object, _generation: object, name: str, state: str, error: tuple[str, str]) -> None:
        told.append((name, state, error))

    def wait(*_: object) -> None:
        if node.outcome is not None:
            raise node.outcome

    monkeypatch.setattr(bringup, "boot", booted)
    monkeypatch.setattr(barrier, "wait", wait)
    monkeypatch.setattr(ControllerClient, "ready", ready)
    node.told = told
    return node


def test_guests_that_do_not_reach_each_other_requeue_the_job(two_nodes: Node) -> None:
    two_nodes.outcome = FabricError("guest n1 on n1 does not reach guest n2 on n2")
    assert two_nodes.run() == 0
    assert (two_nodes.requeued, two_nodes.drained, two_nodes.held) == ([42], [], [])
    assert two_nodes.told == []


def test_other_nodes_get_the_reason_of_the_failure(two_nodes: Node) -> None:
    two_nodes.outcome = UserError("guest n1 does not answer its node any more")
    assert two_nodes.run() == 0
    line = "guest n1 does not answer its node any more"
    assert two_nodes.state["message"] == line
    assert two_nodes.told == [("n1", "failed", ("user", line))]
    assert (two_nodes.requeued, two_nodes.drained, two_nodes.held) == ([], [], ["rundir"])


def test_an_error_of_another_node_is_shown_and_not_repeated(two_nodes: Node) -> None:
    two_nodes.outcome = barrier.PeerFailedError("node n2", "image tiny:1 did not boot on n2")
    assert two_nodes.run() == 0
    assert two_nodes.state["message"] == "node n2: image tiny:1 did not boot on n2"
    assert two_nodes.told == []


def test_a_job_that_ends_at_the_barrier_leaves_nothing(two_nodes: Node) -> None:
    two_nodes.outcome = Stopped("generation 42.0.0123abcd was ended")
    assert two_nodes.run() == 0
    assert (two_nodes.held, two_nodes.drained, two_nodes.requeued) == ([], [], [])


# --- the job has ended ------------------------------------------------------------------


def test_a_job_that_ends_during_its_boot_leaves_nothing(node: Node) -> None:
    node.outcome = Stopped("generation 42.0.0123abcd was ended")
    assert node.run() == 0
    assert (node.held, node.drained, node.requeued) == ([], [], [])
    assert not node.layout.job(42).exists()


def test_vhpcd_is_asked_in_each_wait_and_may_be_silent(node: Node) -> None:
    node.waits, silent = 3, FabricError("vhpcd does not answer")
    node.answers = [node.lease, silent, node.lease, silent]
    assert node.run() == 0
    assert (node.state["status"], node.answers) == ("ready", [])


@pytest.mark.parametrize(
    "change", [{"state": LeaseState.ENDING}, {"generation": replace(GENERATION, restart=1)}]
)
def test_a_boot_that_waits_stops_when_its_job_has_ended(node: Node, change: dict[str, Any]) -> None:
    node.waits = 3
    node.answers = [node.lease, node.lease, replace(node.lease, **change)]
    assert node.run() == 0
    assert (node.held, node.answers) == ([], [])
    assert not node.layout.job(42).exists()


def test_after_its_epilog_a_prolog_takes_nothing_and_says_so(node: Node) -> None:
    joblock.write_tombstone(node.layout, GENERATION)
    assert node.run() == 0
    assert [(ack.generation, ack.clean) for ack in node.acknowledged] == [(GENERATION, True)]
    assert not node.layout.job(42).exists()


def test_a_tombstone_written_in_between_is_no_internal_error(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joblock, "has_tombstone", lambda *_: False)
    joblock.write_tombstone(node.layout, GENERATION)
    assert node.run() == 0
    assert (node.held, node.drained) == ([], [])


# --- what an earlier Prolog left --------------------------------------------------------


def stale(node: Node) -> Generation:
    old = Generation(42, 0, "ffffffff")
    with_old = Journal(node.layout.journals, old)
    with_old.acquire("rundir", "rundir:x", path=str(node.layout.job(42)))
    with_old.close()
    node.layout.job(42).mkdir(parents=True)
    return old


def test_leftovers_of_a_crash_are_cleared_first(node: Node) -> None:
    old = stale(node)
    assert node.run() == 0
    assert list(generations(node.layout.journals)) == [GENERATION]
    queued = [path.name for path in node.layout.outbox.glob("*.json")]
    assert len(queued) == 1
    assert str(old) in queued[0]
    assert node.state["status"] == "ready"


def test_a_quarantine_left_by_a_crash_drains_the_node(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    stale(node)

    def stuck(*_: object) -> None:
        raise quarantine.QuarantinedError([quarantine.record("0000:42:00.0", "gpu", "does not answer")])

    monkeypatch.setattr(teardown, "clear", stuck)
    with pytest.raises(TeardownError):
        node.run()
    assert len(node.drained) == 1
    assert len(list(node.layout.outbox.glob("*.json"))) == 1


# --- its time limit has ended it --------------------------------------------------------


OUT_OF_TIME = "the time limit ended the job in the boot of its guests on n1"


def slow_boot(node: Node, monkeypatch: pytest.MonkeyPatch, reason: str, *, at_end: bool = False) -> None:
    """A boot whose stage "agent g0" takes 61 s, in or after which vhpcd says that the job is ending."""
    late = 0.0
    real = timeline.now

    def boot(work: Boot) -> Generator[None, None, RunningNode]:
        nonlocal late
        with work.recorder.stage("agent g0"):
            late = 61.0
            if not at_end:
                yield
        return (yield from booted(work))

    monkeypatch.setattr(timeline, "now", lambda: real() + late)
    monkeypatch.setattr(bringup, "boot", boot)
    monkeypatch.setattr(Scontrol, "load", lambda *_: SimpleNamespace(reason=reason))
    ended = AccountedJob("42", "TIMEOUT", 61, 1, "alice", "")
    monkeypatch.setattr(Accounting, "job", lambda *_: ended)
    monkeypatch.setattr(
        Accounting, "set_comment", lambda _, job, text: node.comments.append((int(job.name), text))
    )
    node.answers = [node.lease, replace(node.lease, state=LeaseState.ENDING)]
    assert node.run() == 0
    assert (node.held, node.drained, node.requeued) == ([], [], [])


@pytest.mark.promise("boot.time-limit")
def test_a_boot_that_takes_the_whole_time_limit_is_explained(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_boot(node, monkeypatch, "TimeLimit")
    text = f"{OUT_OF_TIME}: it took 61 s, 61 s of it in the stage agent"
    assert [job for job, _ in node.comments] == [42]
    assert f"; {text}" in node.comments[0][1]
    (report,) = node.reports
    assert report.lines[-1].startswith(text)
    assert "--time" in report.lines[-1]
    line = timeline.read_timeline(node.layout.timeline(GENERATION))
    assert line is not None
    assert [stage.name for stage in line.stages if stage.detail.startswith(f"failed: {text}")] == ["agent g0"]
    assert timelimit.note(line).startswith(f"told: {text}"), "what the Epilog acknowledges"


@pytest.mark.promise("boot.time-limit")
def test_a_time_limit_that_ends_with_the_boot_is_explained(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_boot(node, monkeypatch, "TimeLimit", at_end=True)
    assert f"{OUT_OF_TIME}: it took 61 s" in node.comments[0][1]
    line = timeline.read_timeline(node.layout.timeline(GENERATION))
    assert timelimit.note(line).startswith(f"told: {OUT_OF_TIME}")


def test_a_cancelled_boot_is_not_called_a_time_limit(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_boot(node, monkeypatch, "None")
    assert (node.comments, node.reports) == ([], [])
    assert timelimit.note(timeline.read_timeline(node.layout.timeline(GENERATION))) == ""
