# SPDX-License-Identifier: Apache-2.0
"""Limits of the policy for all checkpoints of a user and of an account."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoint_rig import CHECKPOINTS, Site, nodes
from controller_lab import request

from vhpc_slurm.config import Config
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import CheckpointState, CheckpointTotal, KeeperState, Lease, Viewer

pytest_plugins = ["checkpoint_sites"]

MIB = 1 << 20
ALICE, BOB = 2001, 2002
RULES = (
    Rule(name="none", partitions=("none",), max_checkpoint_user_mib=0),
    Rule(name="open", partitions=("open",)),
    Rule(name="all", max_checkpoint_user_mib=5000, max_checkpoint_account_mib=6000),
)


@pytest.fixture
def site_config() -> Config:
    return Config(policy=RULES, checkpoint=CHECKPOINTS)


@pytest.fixture(autouse=True)
def _sizes(site: Site) -> None:
    """Jobs have 4096 MiB of memory, and save 1000 MiB."""
    site.size = 500 * MIB


def job(site: Site, job_id: int, **other: Any) -> Lease:
    return site.open(request(job_id, **({"account": "physics"} | other)), nodes())


def refused(site: Site, lease: Lease) -> str:
    """Why a job is not saved; nothing of the attempt is left."""
    before = site.store.checkpoints.page(0), site.store.checkpoints.sizes.all()
    with pytest.raises(UserError) as raised:
        site.ledger.begin(lease.generation.job_id, "", stop=False, uid=None)
    assert (site.store.checkpoints.page(0), site.store.checkpoints.sizes.all()) == before
    assert raised.value.hint == "delete some with vhpc checkpoint rm, see: vhpc checkpoint ls"
    return raised.value.why


def test_the_first_of_a_job_counts_as_its_memory(site: Site) -> None:
    site.save(job(site, 1))
    second = job(site, 2)
    assert refused(site, second) == (
        "policy rule 'all' permits 5000 MiB of checkpoints for each user, and alice would have 5096 MiB with "
        "this one, which may need 4096 MiB"
    )
    assert site.layer.removal.remove(["1.1"], ALICE).removed == ("1.1",)
    site.save(second)


def test_later_ones_count_as_measured(site: Site) -> None:
    for number in (1, 2):
        lease = job(site, number, partition="open")
        site.save(lease)
        site.save(lease)
    site.save(site.open(request(3, account="physics", partition="open"), nodes()))
    assert [one.bytes for one in site.layer.quota.totals(None)] == [5000 * MIB, 5000 * MIB]
    last = job(site, 4)
    assert "alice would have 9096 MiB" in refused(site, last)


def test_those_that_a_new_one_replaces_do_not_count(site: Site) -> None:
    lease = job(site, 1)
    site.size = 1000 * MIB
    made = [site.save(lease) for _ in range(4)]
    assert [site.state(one.serial) for one in made[2:]] == [CheckpointState.VALID] * 2
    site.size = 1600 * MIB  # more than was expected: it counts afterwards
    site.save(lease)
    assert "alice would have 6400 MiB with this one, which may need 3200 MiB" in refused(site, lease)


def test_two_that_begin_at_once_do_not_use_the_same_room(site: Site) -> None:
    first, second = job(site, 1), job(site, 2)
    made = site.ledger.begin(1, "", stop=False, uid=ALICE)
    assert "alice would have 8192 MiB" in refused(site, second)
    site.say(first.generation, "n1", KeeperState.FAILED, made.serial)
    site.ledger.begin(2, "", stop=False, uid=ALICE)


def test_one_that_is_made_counts_as_what_it_adds(site: Site) -> None:
    open_jobs = [job(site, number, partition="open") for number in (1, 2)]
    for lease in open_jobs:
        site.save(lease)
        site.save(lease)
    site.ledger.begin(1, "", stop=False, uid=ALICE)
    total = CheckpointTotal("user", "alice", 4000 * MIB)
    assert site.layer.quota.totals(Viewer(ALICE))[0] == total


def test_users_of_an_account_share_its_limit(site: Site) -> None:
    site.size = 1100 * MIB
    site.save(job(site, 1))
    bob = site.open(request(2, account="physics", user="bob", uid=BOB, gid=BOB), nodes())
    assert refused(site, bob) == (
        "policy rule 'all' permits 6000 MiB of checkpoints for each account, and account physics would have "
        "6296 MiB with this one, which may need 4096 MiB"
    )
    site.save(site.open(request(3, account="", user="bob", uid=BOB, gid=BOB), nodes()))


def test_zero_means_no_checkpoints(site: Site) -> None:
    assert refused(site, job(site, 1, partition="none")) == "policy rule 'none' permits no checkpoints"


def test_totals_are_those_that_a_user_may_see(site: Site) -> None:
    site.save(job(site, 1))
    site.save(site.open(request(2, account="bio", user="bob", uid=BOB, gid=BOB, partition="open"), nodes()))
    alice = CheckpointTotal("user", "alice", 1000 * MIB, 5000 * MIB, "all")
    physics = CheckpointTotal("account", "physics", 1000 * MIB, 6000 * MIB, "all")
    bob, bio = CheckpointTotal("user", "bob", 1000 * MIB), CheckpointTotal("account", "bio", 1000 * MIB)
    totals = site.layer.quota.totals
    assert totals(None) == totals(Viewer(9, everything=True)) == (alice, bob, bio, physics)
    assert totals(Viewer(ALICE)) == (alice, physics)
    assert totals(Viewer(ALICE, accounts=("bio",))) == (alice, bio, physics)
    assert totals(Viewer(9)) == ()


def test_a_checkpoint_of_an_older_vhpcd_has_a_size(site: Site) -> None:
    site.save(job(site, 1))
    with site.store.transaction():
        site.store.database.execute("DELETE FROM checkpoint_size")  # type: ignore[attr-defined]
    assert [one.bytes for one in site.store.checkpoints.sizes.all()] == [1000 * MIB]


def test_a_job_that_continues_one_needs_as_much(site: Site) -> None:
    first = job(site, 1)
    site.save(first, "a", stop=True)
    site.end(first)
    lease = site.resume(2, "a", nodes(), account="physics")
    made = site.ledger.begin(2, "", stop=False, uid=ALICE)
    assert made.generation == lease.generation
    assert [one.bytes for one in site.store.checkpoints.sizes.all()] == [1000 * MIB] * 2
