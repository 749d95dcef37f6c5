# SPDX-License-Identifier: Apache-2.0
"""Reservations of live guests: written before they are used, read from journals, released with them."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from vhpc_slurm.config import Config, Paths
from vhpc_slurm.device import PassthroughDevice
from vhpc_slurm.errors import NodeError
from vhpc_slurm.hardware import Reservation
from vhpc_slurm.model import (
    Generation,
    GuestCell,
    GuestPlan,
    GuestTopology,
    NodePlan,
    VcpuPin,
)
from vhpc_slurm.node.resource import registry, reservations
from vhpc_slurm.node.store.journal import Journal, read_entries
from vhpc_slurm.node.store.layout import Layout

FIRST, SECOND = Generation(42, 0, "0123abcd"), Generation(43, 0, "4567ef01")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(Config(paths=Paths(state=str(tmp_path / "state"), run=str(tmp_path / "run"))))


def plan(generation: Generation, *guests: tuple[int, ...]) -> NodePlan:
    return NodePlan(
        generation=generation,
        node="n1",
        guests=tuple(
            GuestPlan(
                index=index,
                hostname="n1",
                pins=tuple(VcpuPin(vcpu, cpu, 0) for vcpu, cpu in enumerate(cpus)),
                topology=GuestTopology(1, 1, len(cpus), 1),
                cells=(GuestCell(0, tuple(range(len(cpus))), 1024, 1),),
                memory_mib=1024,
                emulator_cpus=cpus,
                emulator_choice="",
                hugepage_kib=2048,
                devices=(PassthroughDevice(f"0000:0b:00.{index}", "gpu", 1, "pci0000:08"),),
            )
            for index, cpus in enumerate(guests)
        ),
        job_memory_mib=4096,
        reserve_mib=0,
    )


def test_reservations_of_a_plan_are_read_back_from_the_journal(layout: Layout) -> None:
    reservations.Reservations().take(Journal(layout.journals, FIRST), plan(FIRST, (4, 2), (6,)))
    assert reservations.live(layout) == (
        Reservation("42.0.0123abcd", 0, (2, 4), ((1, 1024),), 2048, ("0000:0b:00.0",)),
        Reservation("42.0.0123abcd", 1, (6,), ((1, 1024),), 2048, ("0000:0b:00.1",)),
    )


def test_a_generation_does_not_count_against_itself(layout: Layout) -> None:
    reservations.Reservations().take(Journal(layout.journals, FIRST), plan(FIRST, (0,)))
    reservations.Reservations().take(Journal(layout.journals, SECOND), plan(SECOND, (1,)))
    assert [reservation.generation for reservation in reservations.live(layout, excluding=FIRST)] == [
        str(SECOND)
    ]


def test_a_reservation_ends_when_all_of_it_is_released(layout: Layout) -> None:
    journal = Journal(layout.journals, FIRST)
    reservations.Reservations().take(journal, plan(FIRST, (0,)))
    assert registry.release_all(layout, journal) == []
    assert reservations.live(layout) == ()


def test_a_reservation_stays_while_a_guest_cannot_be_ended(layout: Layout) -> None:
    """Its release comes after the guest's own, and what failed stays in the journal."""
    journal = Journal(layout.journals, FIRST)
    reservations.Reservations().take(journal, plan(FIRST, (0,)))
    journal.acquire("domain", "domain:g0", name="vhpc-42-0-0123abcd-g0", uid=0)
    assert [entry.kind for entry in journal.held()] == ["domain", "claim"]


def test_reading_a_journal_changes_nothing_of_it(layout: Layout) -> None:
    """A line that is being written by its owner must not be cut off by a reader."""
    journal = Journal(layout.journals, FIRST)
    journal.acquire("uid", "uid:1", uid=1)
    with journal.path.open("a") as out:
        out.write('{"event":"acq')
    before = journal.path.read_bytes()
    assert [entry.key for entry in read_entries(layout.journals, FIRST)] == ["uid:1"]
    assert journal.path.read_bytes() == before


def test_no_journal_holds_nothing(layout: Layout) -> None:
    assert read_entries(layout.journals, FIRST) == []
    assert reservations.live(layout) == ()


def test_a_damaged_reservation_is_an_error_and_not_a_free_cpu(layout: Layout) -> None:
    Journal(layout.journals, FIRST).acquire("claim", "claim:g0", cpus="all")
    with pytest.raises(NodeError, match="is damaged"):
        reservations.live(layout)


def _reserve_lowest(
    layout: Layout, generation: Generation, cpus: int, found: multiprocessing.SimpleQueue[int]
) -> None:
    """Take the lowest free CPU, slowly: without the lock both would take the same."""
    with reservations.plan_lock(layout, 30):
        held = {cpu for reservation in reservations.live(layout) for cpu in reservation.cpus}
        cpu = min(set(range(cpus)) - held)
        time.sleep(0.1)
        reservations.Reservations().take(Journal(layout.journals, generation), plan(generation, (cpu,)))
        found.put(cpu)


def test_two_prologs_never_take_the_same_cpu(layout: Layout) -> None:
    context = multiprocessing.get_context("fork")
    found: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    generations = [Generation(job, 0, "0123abcd") for job in range(1, 5)]
    workers = [context.Process(target=_reserve_lowest, args=(layout, g, 8, found)) for g in generations]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert sorted(found.get() for _ in workers) == [0, 1, 2, 3]


def test_a_prolog_that_hangs_is_an_error_in_time(layout: Layout) -> None:
    with (
        reservations.plan_lock(layout, 1),
        pytest.raises(NodeError, match="planning"),
        reservations.plan_lock(layout, 0.05),
    ):
        raise AssertionError("the lock was given twice")
