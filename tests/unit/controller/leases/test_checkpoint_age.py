# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are older than the site keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_rig import Site, nodes
from controller_lab import request
from store_backends import open_at, place

from vhpc_slurm.config import Config
from vhpc_slurm.config.checkpoint import Checkpoint
from vhpc_slurm.controller.leases.checkpoint_removal import DAY_S
from vhpc_slurm.model import CheckpointState

pytest_plugins = ["checkpoint_sites"]


@pytest.fixture
def site_config() -> Config:
    return Config(checkpoint=Checkpoint(folder="/ck", max_age_days=2))


def aged(site: Site) -> list[str]:
    return [one.name for one in site.layer.removal.too_old()]


def test_age_begins_when_a_checkpoint_is_valid(site: Site) -> None:
    lease = site.open(request(7), nodes())
    site.save(lease, "a")
    site.now += DAY_S
    site.save(lease, "b")
    site.now += DAY_S
    assert aged(site) == []
    site.now += 1
    (one,) = site.layer.removal.too_old()
    site.layer.removal.expire_too_old([one])
    found = site.store.checkpoints.get(one.serial)
    assert found is not None
    assert (found.name, found.state, found.error) == (
        "a",
        CheckpointState.REMOVED,
        "older than the site keeps checkpoints (max_age_days = 2)",
    )
    assert site.ledger.kept([one.serial]) == frozenset()
    assert aged(site) == []


def test_one_that_a_job_continues_stays(site: Site) -> None:
    first = site.save_and_stop(7, "a")
    site.end(first)
    lease = site.resume(8, "a", nodes())
    site.now += 3 * DAY_S
    assert aged(site) == []
    site.end(lease)
    (one,) = site.layer.removal.too_old()
    again = site.resume(9, "a", nodes())
    site.layer.removal.expire_too_old([one])  # a job has begun to continue it while Slurm was asked
    assert site.state(one.serial) is CheckpointState.VALID
    site.end(again)
    assert aged(site) == ["a"]


def test_a_job_that_is_being_ended_keeps_it(site: Site) -> None:
    lease = site.save_and_stop(7, "a")
    site.now += 3 * DAY_S
    assert aged(site) == []
    site.end(lease)
    assert aged(site) == ["a"]


def test_without_a_limit_nothing_is_too_old(tmp_path: Path) -> None:
    site = Site(open_at(place("sqlite", tmp_path)))
    site.save(site.open(request(7), nodes()))
    site.now += 3650 * DAY_S
    assert aged(site) == []
    site.store.close()
