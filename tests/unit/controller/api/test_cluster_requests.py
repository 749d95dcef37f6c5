# SPDX-License-Identifier: Apache-2.0
"""Requests about clusters: answers that wait for changes, keys of guests, and what users may do."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from checkpoint_rig import nodes
from checkpoint_vhpcd import ALICE, BOB, Vhpcd, opening, run
from controller_lab import request

from vhpc_slurm.config.network import Network
from vhpc_slurm.controller.api import cluster_messages as messages
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.wire_types import ReadyState
from vhpc_slurm.model import Generation, LeaseState, Roster, Viewer

NETWORK = Network(allowed=("none", "job"))


async def booting(vhpcd: Vhpcd, job_id: int, *names: str, cluster: str = "dask") -> Generation:
    """A job whose nodes have taken the lease."""
    generation = await vhpcd.open(request(job_id, cluster=cluster), nodes(*names))
    for node in names:
        taken = await vhpcd.ask(wire.GetLease(job_id=job_id, restart=0, node=node, wait_s=1.0))
        assert isinstance(taken, wire.LeaseAnswer), taken
        assert taken.ssh is not None  # also where it has one guest
    return generation


def passing(vhpcd: Vhpcd, generation: Generation, node: str, wait_s: float = 0.0) -> asyncio.Task[ReadyState]:
    """A node's report that its guests are ready, with its answer."""
    body = wire.ReportReady(generation=str(generation), node=node, state="passed", wait_s=wait_s)
    return asyncio.create_task(vhpcd.ask(body))


def asking(
    vhpcd: Vhpcd, generation: Generation, node: str, applied: int, gone: tuple[int, ...] = ()
) -> asyncio.Task[Roster]:
    """A question of a node that waits, with its answer."""

    async def ask() -> Roster:
        body = messages.AskRoster(
            generation=str(generation), node=node, applied=applied, gone=gone, wait_s=50.0
        )
        answer = await vhpcd.ask(body)
        assert isinstance(answer, messages.RosterAnswer), answer
        return answer.roster

    return asyncio.create_task(ask())


def ids(roster: Roster) -> list[int]:
    return [member.generation.job_id for member in roster.members]


def test_nodes_are_told_of_a_member_and_its_start_waits_for_them(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        one = await booting(vhpcd, 1, "n1")
        first = passing(vhpcd, one, "n1", wait_s=50.0)
        roster = await asking(vhpcd, one, "n1", 0)
        assert (roster.version, ids(roster)) == (1, [1])
        assert roster.members[0].host_public.startswith("ssh-ed25519 ")
        waiting = asking(vhpcd, one, "n1", 1)
        assert (await first).settled

        two = await booting(vhpcd, 2, "n2", "n3")
        own = [asking(vhpcd, two, node, 1) for node in ("n2", "n3")]  # they know of the first job
        await passing(vhpcd, two, "n3")
        assert not waiting.done()
        start = passing(vhpcd, two, "n2", wait_s=50.0)
        roster = await waiting
        assert (roster.version, ids(roster)) == (2, [2])
        assert [ids(await one_of) for one_of in own] == [[2], [2]]
        again = [asking(vhpcd, two, node, 2) for node in ("n2", "n3")]
        await asyncio.sleep(0.05)
        assert not start.done()
        again.append(asking(vhpcd, one, "n1", 2))
        state = await start
        assert (state.missing, state.unaware, state.settled) == (0, 0, True)

        # a guest ends, then the job
        gone = asking(vhpcd, two, "n3", 2, gone=(1,))
        assert [(await one_of).members[0].gone for one_of in (*again, gone)] == [(1,)] * 4
        waiting, late = asking(vhpcd, one, "n1", 3), asking(vhpcd, two, "n2", 3)
        await asyncio.sleep(0.05)
        await vhpcd.ask(wire.Ending(job_id=2, restart=None))
        assert await waiting == Roster(4, left=(two,))
        assert (await late).over

    run(tmp_path, test, network=NETWORK)


def test_a_start_is_told_which_nodes_do_not_know_of_it(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        one = await booting(vhpcd, 1, "n1")
        await passing(vhpcd, one, "n1")
        two = await booting(vhpcd, 2, "n2")
        state = await passing(vhpcd, two, "n2", wait_s=0.1)
        assert (state.unaware, state.first_unaware) == (2, ("n1 (job 1)", "n2 (job 2)"))
        start = passing(vhpcd, two, "n2", wait_s=50.0)
        asking(vhpcd, two, "n2", 2)
        await asyncio.sleep(0.05)
        assert not start.done()
        await vhpcd.ask(wire.Ending(job_id=1, restart=None))
        assert (await start).settled

    run(tmp_path, test, network=NETWORK)


def test_users_have_their_own_clusters(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        async def listed(uid: int | None) -> list[tuple[str, int]]:
            page = await vhpcd.ask(messages.ListClusters(), uid)
            return [(one.name, one.uid) for one in page.clusters]

        one = await booting(vhpcd, 1, "n1", "n2")
        kept = await vhpcd.ask(messages.KeepCluster(name="later", for_s=60.0), BOB)
        assert (kept.cluster.kept, kept.cluster.uid) == (True, BOB)
        assert await listed(ALICE) == [("dask", ALICE)]
        assert await listed(BOB) == [("later", BOB)]
        assert await listed(None) == [("dask", ALICE), ("later", BOB)]
        (serial,) = [one.serial for one in (await vhpcd.ask(messages.ListClusters(), ALICE)).clusters]
        page = await vhpcd.ask(messages.ListClusterJobs(cluster=serial), ALICE)
        assert [(job.member.generation, job.joined, job.uid) for job in page.jobs] == [(one, False, ALICE)]
        assert abs(page.jobs[0].since - time.time()) < 60
        operator = Viewer(BOB, everything=True)
        seen: Any = await vhpcd.parts.requests.answer(messages.ListClusters(), BOB, operator)
        assert [item.uid for item in seen.clusters] == [ALICE, BOB]
        seen = await vhpcd.parts.requests.answer(messages.ListClusterJobs(cluster=serial), BOB, operator)
        assert seen == page
        seen = await vhpcd.parts.requests.answer(messages.RemoveCluster(cluster=serial), BOB, operator)
        assert seen.what == "cluster dask is not removed", "operators may, as they may cancel its jobs"
        refused = await vhpcd.ask(messages.ListClusterJobs(cluster=serial), BOB)
        assert refused.what == f"there is no cluster of number {serial}"
        assert await vhpcd.ask(messages.RemoveCluster(cluster=serial), BOB) == refused
        said = await vhpcd.ask(messages.RemoveCluster(cluster=serial), ALICE)
        assert (said.what, said.why) == ("cluster dask is not removed", "it has jobs: 1")
        assert said.hint == "end them first: scancel 1"
        await vhpcd.ask(messages.RemoveCluster(cluster=kept.cluster.serial), BOB)
        assert await listed(BOB) == []
        denied = await vhpcd.ask(messages.AskRoster(generation=str(one), node="n1"), ALICE)
        assert denied.kind == "user"
        # users reach these requests, and no others about clusters
        assert await vhpcd.users.answer(messages.ListClusters(), ALICE) is not None
        assert await vhpcd.users.answer(messages.AskRoster(generation=str(one), node="n1"), ALICE) is None

    run(tmp_path, test, network=NETWORK)


def test_a_user_keeps_a_limited_number_of_names(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        for number in range(64):
            made = await vhpcd.ask(messages.KeepCluster(name=f"c{number}"), ALICE)
            assert isinstance(made, messages.ClusterAnswer)
        refused = await vhpcd.ask(messages.KeepCluster(name="one-more"), ALICE)
        assert refused.why == "you keep 64 clusters already"
        assert isinstance(await vhpcd.ask(messages.KeepCluster(name="c0"), ALICE), messages.ClusterAnswer)
        answer = await vhpcd.ask(opening(request(1, cluster="one-more:keep"), nodes("n1")))
        assert answer.lease.state is LeaseState.REFUSED
        assert "you keep 64 clusters already" in answer.lease.refusal
        found = await vhpcd.ask(messages.ListClusters(), ALICE)
        assert "one-more" not in {one.name for one in found.clusters}

    run(tmp_path, test, network=NETWORK)


def test_a_brief_lease_names_the_cluster(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        answer = await vhpcd.ask(opening(request(1, cluster="dask"), nodes("n1")))
        assert isinstance(answer, wire.LeaseAnswer)
        assert answer.lease.cluster is not None
        assert answer.lease.brief().cluster == answer.lease.cluster

    run(tmp_path, test, network=NETWORK)
