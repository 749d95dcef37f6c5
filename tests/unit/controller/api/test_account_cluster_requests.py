# SPDX-License-Identifier: Apache-2.0
"""Requests about clusters of an account: Slurm says whose they are, the policy who may change them."""

from __future__ import annotations

from typing import Any

from checkpoint_rig import nodes
from checkpoint_vhpcd import ALICE, BOB, Vhpcd, opening, run
from controller_lab import request
from msgspec.structs import replace

from vhpc_slurm.config.network import Network
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.controller.api import cluster_messages as messages
from vhpc_slurm.model import LeaseState, Viewer

NETWORK = Network(allowed=("none", "job"))
RULES = (
    Rule(name="bob joins", users=("bob",), account_clusters="join"),
    Rule(name="physics", accounts=("physics",), account_clusters="create", max_cluster_kept_days=7),
    Rule(name="short", max_cluster_kept_days=0),
)
OF_ALICE = Viewer(ALICE, user="alice", member_of=("physics",))
OF_BOB = Viewer(BOB, user="bob", member_of=("physics",))
STRANGER = Viewer(2003, user="carol", member_of=("bio",))
COORDINATOR = Viewer(2003, ("physics",), user="carol")
OPERATOR = Viewer(2004, everything=True)
DASK = "physics/dask"


async def ask(vhpcd: Vhpcd, body: Any, viewer: Viewer | None) -> Any:
    return await vhpcd.parts.requests.answer(body, 0 if viewer is None else viewer.uid, viewer)


async def asked(vhpcd: Vhpcd, body: Any, uid: int) -> Any:
    """The answer to a user, whose rights vhpcd asks Slurm for."""
    return await vhpcd.users.answer(body, uid)


async def names(vhpcd: Vhpcd, viewer: Viewer | None) -> list[str]:
    return [one.name for one in (await ask(vhpcd, messages.ListClusters(), viewer)).clusters]


async def job(vhpcd: Vhpcd, job_id: int, **asked: Any) -> Any:
    fields = {"cluster": DASK, "account": "physics"} | asked
    return (await vhpcd.ask(opening(request(job_id, **fields), nodes("n1")))).lease


def test_a_job_needs_an_association_of_its_user(tmp_path: Any) -> None:
    """Where Slurm does not enforce associations, users choose the accounts of their jobs."""

    async def test(vhpcd: Vhpcd) -> None:
        vhpcd.ctld.associations = {"alice": ("bio", "physics"), "bob": ("bio",)}
        assert (await job(vhpcd, 1)).state is LeaseState.READY
        refused = await job(vhpcd, 2, user="bob", uid=BOB)
        assert refused.state is LeaseState.REFUSED
        assert refused.refusal == (
            "--vhpc-cluster=physics/dask: Slurm has no association of bob with account physics "
            "(operators: see sacctmgr add user)"
        )
        assert (await job(vhpcd, 3, user="bob", uid=BOB, cluster="dask")).state is LeaseState.READY

        vhpcd.ctld.associations = None
        answer = await vhpcd.ask(opening(request(4, cluster=DASK, account="physics"), nodes("n1")))
        assert answer.what == "scontrol failed"

    run(tmp_path, test, network=NETWORK, policy=RULES)


def test_users_of_the_account_see_its_clusters(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        vhpcd.ctld.associations = {"alice": ("physics",), "bob": ("physics",)}
        await job(vhpcd, 1)
        await job(vhpcd, 2, user="bob", uid=BOB)
        await job(vhpcd, 3, cluster="own")
        for viewer, seen in (
            (OF_ALICE, [DASK, "own"]),
            (OF_BOB, [DASK]),
            (STRANGER, []),
            (COORDINATOR, [DASK]),
            (OPERATOR, [DASK, "own"]),
            (None, [DASK, "own"]),
        ):
            assert await names(vhpcd, viewer) == seen
        (cluster, *_) = (await ask(vhpcd, messages.ListClusters(), OF_BOB)).clusters
        assert (cluster.uid, cluster.jobs) == (ALICE, 2)
        page = await ask(vhpcd, messages.ListClusterJobs(cluster=cluster.serial), OF_BOB)
        assert [(one.member.generation.job_id, one.uid) for one in page.jobs] == [(1, ALICE), (2, BOB)]
        refused = await ask(vhpcd, messages.ListClusterJobs(cluster=cluster.serial), STRANGER)
        assert refused.what == f"there is no cluster of number {cluster.serial}"

    run(tmp_path, test, network=NETWORK, policy=RULES)


def test_who_may_create_a_cluster_keeps_and_removes_it(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        keep = messages.KeepCluster(name=DASK)
        made = await ask(vhpcd, keep, OF_ALICE)
        assert made.cluster.name == DASK
        assert 6.9 < (made.cluster.until - made.cluster.created) / 86400 < 7.1
        remove = messages.RemoveCluster(cluster=made.cluster.serial)
        for viewer, said in (
            (OF_BOB, "no policy rule permits bob to create clusters of account physics"),
            (
                replace(STRANGER, member_of=("physics", "bio"), uid=BOB, user="bob"),
                "no policy rule permits bob",
            ),
        ):
            for body in (keep, remove):
                refused = await ask(vhpcd, body, viewer)
                assert refused.why.startswith(said)
        assert "no association of carol" in (await ask(vhpcd, keep, STRANGER)).why
        assert (await ask(vhpcd, remove, STRANGER)).what.startswith("there is no cluster of number")
        assert (await ask(vhpcd, keep, Viewer(ALICE))).what == "vhpcd does not know your accounts"
        for who in (OF_ALICE, COORDINATOR, OPERATOR, None):
            again = await ask(vhpcd, keep, who)
            answer = await ask(vhpcd, messages.RemoveCluster(cluster=again.cluster.serial), who)
            assert isinstance(answer, messages.ClusterAnswer), answer

    run(tmp_path, test, network=NETWORK, policy=RULES)


def test_the_policy_limits_how_long_names_are_kept(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        long = messages.KeepCluster(name=DASK, for_s=8 * 86400.0)
        assert (
            await ask(vhpcd, long, OF_ALICE)
        ).why == "the policy of the site permits to keep 7 days at most"
        short = await ask(vhpcd, messages.KeepCluster(name=DASK, for_s=3600.0), OF_ALICE)
        assert short.cluster.until - short.cluster.created < 3700
        assert (await ask(vhpcd, long, None)).cluster.until > short.cluster.until, "root has no limits"
        own = messages.KeepCluster(name="own")
        # a job of hers in account physics may keep it for seven days
        assert (await ask(vhpcd, own, OF_ALICE)).cluster.until is not None
        assert isinstance(await ask(vhpcd, own, OF_BOB), messages.ClusterAnswer), "his rule has no limit"

    run(tmp_path, test, network=NETWORK, policy=RULES)


def test_slurm_is_asked_for_the_accounts_of_a_user(tmp_path: Any, monkeypatch: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        vhpcd.ctld.associations = {"alice": ("physics",)}
        await job(vhpcd, 1)
        assert [one.name for one in (await asked(vhpcd, messages.ListClusters(), 2005)).clusters] == [DASK]
        vhpcd.ctld.associations = None
        assert (await asked(vhpcd, messages.ListClusters(), 2006)).clusters == ()
        kept = await asked(vhpcd, messages.KeepCluster(name=DASK), 2006)
        assert kept.what == "vhpcd does not know your accounts"

    class User:
        pw_name = "alice"

    monkeypatch.setattr("pwd.getpwuid", lambda _uid: User)
    run(tmp_path, test, network=NETWORK, policy=RULES)
