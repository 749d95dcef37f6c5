# SPDX-License-Identifier: Apache-2.0
"""Prolog plans from what other jobs leave, and what it takes is given back with the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from placement_rig import MANIFEST, REQUEST, host

from vhpc_slurm.config import Config, Paths
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Allocation, Generation, ImageIdentity, Lease, LeaseState, NodeAllocation
from vhpc_slurm.node import teardown
from vhpc_slurm.node.boot import reserve as boot_reserve
from vhpc_slurm.node.resource import reservations
from vhpc_slurm.node.store import joblock
from vhpc_slurm.node.store.journal import Journal, Stopped
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.timeline import Recorder

NODE = host(sockets=2, cores=2)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(Config(paths=Paths(state=str(tmp_path / "state"), run=str(tmp_path / "run"))))


def lease(job: int, *cpu_ids: int) -> Lease:
    image = ImageIdentity(REQUEST.image, "sha256:" + "0" * 64, MANIFEST)
    allocation = Allocation((NodeAllocation("n1", cpu_ids, 2048),))
    return Lease(Generation(job, 0, "0123abcd"), LeaseState.READY, REQUEST, allocation, image)


def reserve(layout: Layout, what: Lease) -> Journal:
    journal = Journal(layout.journals, what.generation)
    journal.stop_when(layout.tombstone(what.generation))
    boot_reserve.reserve(layout, what, NODE, (), journal)
    return journal


def test_simultaneous_jobs_hold_their_planned_resources(layout: Layout) -> None:
    reserve(layout, lease(7, 0, 1))
    reserve(layout, lease(8, 2, 3))
    assert [reservation.cpus for reservation in reservations.live(layout)] == [(0, 4), (1, 5)]


def test_a_cpu_of_another_job_is_refused_and_nothing_is_taken(layout: Layout) -> None:
    reserve(layout, lease(7, 0, 1))
    with pytest.raises(FabricError, match=r"CPUs 0,4 are held by guests of 7\.0\.0123abcd"):
        reserve(layout, lease(8, 0, 1, 2, 3))
    assert [reservation.generation for reservation in reservations.live(layout)] == ["7.0.0123abcd"]


def test_the_same_job_may_plan_again_after_a_crash(layout: Layout) -> None:
    reserve(layout, lease(7, 0, 1)).close()
    reserve(layout, lease(7, 0, 1))
    assert len(reservations.live(layout)) == 1


def test_a_user_error_frees_reservations_before_the_epilog(layout: Layout) -> None:
    journal = reserve(layout, lease(7, 0, 1))
    generation = journal.generation
    teardown.release_guests(layout, journal, Recorder(layout.timeline(generation), generation, "n1"))
    assert reservations.live(layout) == ()
    reserve(layout, lease(8, 0, 1))


def test_a_job_that_has_ended_takes_nothing_more(layout: Layout) -> None:
    ended = lease(7, 0, 1)
    joblock.write_tombstone(layout, ended.generation)
    with pytest.raises(Stopped):
        reserve(layout, ended)
    assert reservations.live(layout) == ()
