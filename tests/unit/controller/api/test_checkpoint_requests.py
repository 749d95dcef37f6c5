# SPDX-License-Identifier: Apache-2.0
"""Requests about checkpoints: who may send them, what slurmctld is asked, and answers that wait."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from typing import Any

import pytest
from checkpoint_rig import nodes, saved
from checkpoint_vhpcd import ALICE, BOB, K, Vhpcd, opening, run
from controller_lab import request

from vhpc_slurm.config.checkpoint import Checkpoint
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.controller.api import checkpoint_messages as messages
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.model import (
    CONTINUED,
    CheckpointState,
    CheckpointTotal,
    KeeperReport,
    OrderKind,
    Removed,
)
from vhpc_slurm.slurm.port import (
    REASON_PROLOG,
    JobStatus,
)


def refusal(answer: object, kind: str = "user") -> str:
    assert isinstance(answer, wire.Failure), answer
    assert answer.kind == kind
    return f"{answer.what}: {answer.why}"


def test_a_keeper_that_waits_is_told_at_once(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7))

        def waiting(node: str, report: KeeperReport | None = None) -> asyncio.Task[Any]:
            body = messages.AskOrder(generation=str(generation), node=node, report=report, wait_s=50.0)
            return asyncio.create_task(vhpcd.ask(body))

        keepers = [waiting("n1"), waiting("n2")]
        await asyncio.sleep(0.05)
        assert [one.result() for one in keepers if one.done()] == []
        answer = await vhpcd.ask(messages.SaveJob(job_id=7), ALICE)
        serial = answer.checkpoint.serial
        assert answer.checkpoint.name == "7.1"
        for state, kind in (
            (K.PREPARED, OrderKind.HOLD),
            (K.HELD, OrderKind.SAVE),
            (K.SAVED, OrderKind.CONTINUE),
        ):
            orders = {(await one).order.kind for one in keepers}
            assert orders <= {OrderKind.PREPARE, OrderKind.HOLD, OrderKind.SAVE}
            parts = {"n1": saved("n1", 0), "n2": saved("n2", 1)} if state is K.SAVED else {}
            keepers = [waiting(node, KeeperReport(serial, state, parts.get(node))) for node in ("n1", "n2")]
            assert [(await one).order.kind for one in keepers] == [kind, kind]
        # the end of the job ends what waits
        keepers = [waiting("n1", KeeperReport(serial, K.CONTINUED))]
        await asyncio.sleep(0.05)
        await vhpcd.ask(wire.Ending(job_id=7, restart=None))
        assert (await keepers[0]).order.kind is OrderKind.OVER

    run(tmp_path, test)


def test_one_keeper_gets_the_comment_about_a_valid_checkpoint(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7))

        async def comment(node: str, serial: int, state: K) -> str:
            part = saved(node, int(node == "n2")) if state is K.SAVED else None
            report = KeeperReport(serial, state, part, "no")
            body = messages.AskOrder(generation=str(generation), node=node, report=report)
            return str((await vhpcd.ask(body)).order.comment)

        serial = await vhpcd.save(generation, "a")
        text = await comment("n1", serial, K.SAVED)
        assert re.fullmatch(r"vhpc: image \S+@sha256:[0-9a-f]{64}; saved as checkpoint a", text), text
        assert await comment("n2", serial, K.SAVED) == ""
        assert await comment("n1", serial, K.CONTINUED) == ""
        failed = (await vhpcd.ask(messages.SaveJob(job_id=7))).checkpoint.serial
        assert await comment("n2", failed, K.FAILED) == ""
        assert await comment("n1", failed, K.HELD) == ""

    run(tmp_path, test)


def test_users_save_list_and_remove_what_is_theirs(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7))
        said = refusal(await vhpcd.ask(messages.SaveJob(job_id=7), BOB))
        assert "belongs to another user" in said
        serial = await vhpcd.save(generation, "a")
        page = await vhpcd.ask(messages.ListCheckpoints(), ALICE)
        (one,) = page.checkpoints
        assert (one.name, one.state, one.node_count, one.held) == ("a", CheckpointState.VALID, 2, 2)
        assert (one.uid, one.generation, one.size) == (ALICE, generation, 8192)
        assert [node.node for node in one.nodes] == ["n1", "n2"]
        assert {guest.state.root for node in one.nodes for guest in node.guests} == {b""}
        assert (await vhpcd.ask(messages.ListCheckpoints(), BOB)).checkpoints == ()
        assert (await vhpcd.ask(messages.ListCheckpoints(job_id=8))).checkpoints == ()
        assert (await vhpcd.ask(messages.ListCheckpoints(after=serial - 1, limit=1))).checkpoints == (one,)
        body = messages.RemoveCheckpoints(names=("a",))
        assert (await vhpcd.ask(body, BOB)).done == Removed(missing=("a",))
        known = messages.KnownCheckpoints(serials=(serial, serial + 1))
        assert (await vhpcd.ask(known)).serials == (serial,)
        assert (await vhpcd.ask(body, ALICE)).done == Removed(("a",))
        assert (await vhpcd.ask(known)).serials == ()

    run(tmp_path, test)


def test_users_send_no_requests_of_nodes(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7))
        for body in (
            messages.AskOrder(generation=str(generation), node="n1"),
            messages.KnownCheckpoints(serials=(1,)),
        ):
            assert await vhpcd.users.answer(body, ALICE) is None
            assert "only root and SlurmUser" in refusal(await vhpcd.ask(body, ALICE))
        answer = await vhpcd.users.answer(messages.SaveJob(job_id=7), ALICE)
        assert isinstance(answer, messages.CheckpointAnswer)
        other = await vhpcd.users.answer(messages.RemoveCheckpoints(names=("7.1",)), BOB)
        assert isinstance(other, messages.CheckpointsRemoved)
        assert other.done == Removed(missing=("7.1",))
        body = messages.AskOrder(generation=str(generation), node="n3")
        assert "has no part on node n3" in refusal(await vhpcd.ask(body), "fabric")

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("job", "line"),
    [
        ({"state": "COMPLETING"}, "it is COMPLETING"),
        ({"restarts": 1}, "it is RUNNING"),
        ({"reason": REASON_PROLOG}, "its guests have not booted yet"),
        ({"batch_host": ""}, "it has no batch script"),
        (None, "Slurm has no such job"),
    ],
)
def test_only_a_batch_script_that_runs_is_saved(tmp_path: Any, job: dict[str, Any] | None, line: str) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        await vhpcd.open(request(7))
        vhpcd.ctld.known = job is not None
        vhpcd.ctld.job = replace(vhpcd.ctld.job, **(job or {}))
        assert line in refusal(await vhpcd.ask(messages.SaveJob(job_id=7), ALICE))

    run(tmp_path, test)


def test_a_job_is_ended_until_it_has_ended(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7))
        vhpcd.ctld.down = True
        await vhpcd.save(generation, "a", stop=True)
        await asyncio.sleep(0.1)
        assert vhpcd.ctld.cancelled == [7]
        tend = vhpcd.parts.reconciler._checkpoints
        assert tend is not None
        await tend()
        assert vhpcd.ctld.cancelled == [7, 7]
        await vhpcd.ask(wire.Ending(job_id=7, restart=None))
        await tend()
        assert vhpcd.ctld.cancelled == [7, 7]

    run(tmp_path, test)


def test_a_node_gets_the_key_of_the_checkpoint_with_the_lease(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7))
        await vhpcd.save(generation, "a", stop=True)
        job = request(8, image=CONTINUED, resume="a")
        allocation = nodes("n3", "n4")
        answer = await vhpcd.ask(opening(job, allocation))
        assert (answer.lease.state, answer.resume) == ("ready", None)
        assert answer.lease.resume.key == b""
        assert answer.lease.request.image == request(7).image
        taken = await vhpcd.ask(wire.GetLease(job_id=8, restart=0, node="n4", wait_s=1.0))
        assert len(taken.resume.key) == 32
        assert [len(node.guests) for node in taken.resume.nodes] == [0, 1]
        looked = await vhpcd.ask(wire.GetLease(job_id=8, restart=0, node="n4", wait_s=0.0))
        assert (looked.resume, looked.lease.resume.key) == (None, b"")
        listed = await vhpcd.ask(wire.ListLeases(job_id=8), ALICE)
        assert listed.records[0].lease.resume.key == b""
        assert (await vhpcd.ask(opening(job, allocation))).lease.generation == answer.lease.generation

    run(tmp_path, test)


def test_an_old_checkpoint_of_a_job_in_the_queue_stays(tmp_path: Any) -> None:
    now = time.time()

    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7))
        serial = await vhpcd.save(generation, "a")
        await vhpcd.ask(wire.Ending(job_id=7, restart=None))
        tend = vhpcd.parts.reconciler._checkpoints
        assert tend is not None

        async def states() -> list[CheckpointState]:
            await tend()
            return [one.state for one in (await vhpcd.ask(messages.ListCheckpoints(), ALICE)).checkpoints]

        with vhpcd.store.transaction():
            vhpcd.store.checkpoints.move(serial, CheckpointState.VALID, now - 86500)
        vhpcd.ctld.listed = (JobStatus(7, 1, "PENDING", "BeginTime", None),)
        assert await states() == [CheckpointState.VALID]
        body = messages.RemoveCheckpoints(older_s=86400.0)
        assert (await vhpcd.ask(body, ALICE)).done == Removed()
        vhpcd.ctld.listed = ()
        assert await states() == [CheckpointState.VALID], "Slurm has the job, although it did not list it"
        vhpcd.ctld.known = False
        assert await states() == [CheckpointState.REMOVED]

    run(tmp_path, test, checkpoint=Checkpoint(folder="/ck", max_age_days=1))


def test_the_last_page_of_a_list_has_the_totals(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7))
        serial = await vhpcd.save(generation, "a")
        page = await vhpcd.ask(messages.ListCheckpoints(), ALICE)
        assert page.totals == (CheckpointTotal("user", "alice", 8192, 20480 << 20, "all"),)
        assert (await vhpcd.ask(messages.ListCheckpoints(after=serial - 1, limit=1), ALICE)).totals == ()
        assert (await vhpcd.ask(messages.ListCheckpoints(), BOB)).totals == ()

    run(tmp_path, test, policy=(Rule(name="all", max_checkpoint_user_mib=20480),))


def test_the_policy_decides_again_when_a_job_continues(tmp_path: Any) -> None:
    rule = Rule(name="physics", accounts=("physics",), images=("other:*",))
    rest = Rule(name="rest")

    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7))
        await vhpcd.save(generation, "a", stop=True)
        job = request(8, image=CONTINUED, resume="a", account="physics")
        answer = await vhpcd.ask(opening(job, nodes("n3", "n4")))
        assert answer.lease.state == "refused"
        assert "policy rule 'physics' does not permit image debian-minimal:latest" in answer.lease.refusal
        job = request(9, image=CONTINUED, resume="b")
        answer = await vhpcd.ask(opening(job, nodes("n3", "n4")))
        assert "there is no checkpoint b of yours" in answer.lease.refusal

    run(tmp_path, test, policy=(rule, rest))
