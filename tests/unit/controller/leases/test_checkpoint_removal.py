# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that users remove: several names at once, and those of an age."""

from __future__ import annotations

from checkpoint_rig import Site

from vhpc_slurm.model import CheckpointState, InUse, KeeperState, Lease, Removed

pytest_plugins = ["checkpoint_sites"]

S = CheckpointState
ALICE, BOB = 2001, 2002


def test_the_names_that_exist_are_removed(site: Site, job: Lease) -> None:
    first, second = site.save(job, "a"), site.save(job, "b")
    remove = site.layer.removal.remove
    assert remove(["a", "b"], BOB) == Removed(missing=("a", "b"))
    assert remove(["a", "c", "a"], ALICE) == Removed(("a",), ("c",))
    assert remove(["a", "b"], None) == Removed(("b",), ("a",))
    assert [site.state(one.serial) for one in (first, second)] == [S.REMOVED, S.REMOVED]


def test_one_that_is_made_is_removed_when_it_has_failed(site: Site, job: Lease) -> None:
    site.save(job, "a")
    made = site.ledger.begin(7, "c", stop=False, uid=ALICE)
    remove = site.layer.removal.remove
    assert remove(["c", "a"], ALICE) == Removed(("a",), (), (InUse("c", "job 7 is being saved"),))
    site.say(job.generation, "n1", KeeperState.FAILED, made.serial)
    assert remove(["c"], ALICE) == Removed(("c",))
    assert site.store.checkpoints.get(made.serial) is None


def test_of_one_name_the_newest_valid_one_is_removed(site: Site, job: Lease) -> None:
    old, new = site.save(job, "a"), site.save(job, "a")
    failed = site.ledger.begin(7, "a", stop=False, uid=ALICE)
    site.say(job.generation, "n1", KeeperState.FAILED, failed.serial)
    assert site.layer.removal.remove(["a"], ALICE) == Removed(("a",))
    assert [site.state(one.serial) for one in (old, new, failed)] == [S.VALID, S.REMOVED, S.FAILED]


def test_those_of_an_age_are_the_users_own(site: Site, job: Lease) -> None:
    site.save(job, "a")
    site.now += 100
    site.save(job, "b")
    older = site.layer.removal.older
    assert [one.name for one in older(50.0, ALICE)] == ["a"]
    assert older(50.0, BOB) == older(100.0, ALICE) == ()
    site.now += 1
    assert [one.name for one in older(0.0, None)] == ["a", "b"]
    assert site.layer.removal.expire(older(0.0, ALICE)) == ("a", "b")
    assert older(0.0, None) == ()
