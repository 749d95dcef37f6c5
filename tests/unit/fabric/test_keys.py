# SPDX-License-Identifier: Apache-2.0
"""Partition keys: whose they are, and what the database remembers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from controller_lab import Alone, allocation, identity, request
from hypothesis import given
from hypothesis import strategies as st
from key_fabric import Fabric, an_assignment, generation
from store_backends import Place, open_at

from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.sqlstore import SqlStore
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import keys, numbers
from vhpc_slurm.fabric.backend import KeyPolicy, NoNetwork
from vhpc_slurm.fabric.keys import KeySnapshot, KeyState
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.model import Generation, NetworkIdentity

POOL = KeyPool(0x1000, 0x1003)


# --- GUIDs and choices -----------------------------------------------------------------------


def test_a_guid_is_made_of_pkey_rail_rank_and_vf() -> None:
    assert numbers.port_guid(0x1012, 1, 0x0203, 4) == 0x02CC_1012_01_0203_04
    assert numbers.node_guid(0x1012, 1, 0x0203, 4) == 0x02CD_1012_01_0203_04


def test_guids_are_locally_administered_and_not_multicast() -> None:
    first_byte = numbers.port_guid(1, 0, 0, 0) >> 56
    assert first_byte & 0b10
    assert not first_byte & 0b01


@pytest.mark.parametrize(
    "place",
    [(0, 0, 0, 0), (0x7FFF, 0, 0, 0), (1, 256, 0, 0), (1, 0, 65536, 0), (1, 0, 0, 256), (1, -1, 0, 0)],
)
def test_values_too_large_for_a_guid_are_refused(place: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="no GUID"):
        numbers.port_guid(*place)


@given(
    st.lists(
        st.tuples(st.integers(1, 0x7FFE), st.integers(0, 255), st.integers(0, 65535), st.integers(0, 255)),
        unique=True,
        min_size=2,
    )
)
def test_no_two_places_have_one_guid(places: list[tuple[int, int, int, int]]) -> None:
    guids = [guid(*place) for place in places for guid in (numbers.port_guid, numbers.node_guid)]
    assert len(set(guids)) == len(guids)


@pytest.mark.parametrize(
    ("first", "last", "reserved"),
    [(0, 5, ()), (1, 0x7FFF, ()), (0x8000, 0x8001, ()), (9, 8, ()), (5, 6, (5, 6))],
)
def test_a_pool_of_keys_with_a_meaning_of_their_own_is_refused(
    first: int, last: int, reserved: tuple[int, ...]
) -> None:
    with pytest.raises(FabricError, match="partition key"):
        KeyPool(first, last, frozenset(reserved))


def test_unused_keys_come_first_then_the_longest_free() -> None:
    freed = {0x1000: 7, 0x1001: 3, 0x1003: 5}
    pool = KeyPool(0x1000, 0x1004, frozenset({0x1004}))
    order = []
    snapshot = KeySnapshot(9, (), freed)
    for number in range(1, 5):
        chosen = keys.assign(pool, snapshot, generation(number), f"job {number}", ranks=1, rails=1, vfs=1)
        order.append(chosen.pkey)
        snapshot = replace(snapshot, assignments=(*snapshot.assignments, chosen))
    assert order == [0x1002, 0x1001, 0x1003, 0x1000]
    with pytest.raises(FabricError, match="4 are in use, 0 in quarantine"):
        keys.assign(pool, snapshot, generation(9), "job 9", ranks=1, rails=1, vfs=1)


def test_jobs_of_a_user_share_a_key_and_fill_rank_gaps() -> None:
    snapshot = KeySnapshot(
        1,
        (
            an_assignment(1, owner="user 1", first_rank=0, ranks=2),
            an_assignment(2, owner="user 1", first_rank=5, ranks=2),
            an_assignment(3, owner="user 2", pkey=0x1001),
        ),
    )
    chosen = keys.assign(POOL, snapshot, generation(4), "user 1", ranks=3, rails=1, vfs=1)
    assert (chosen.pkey, chosen.first_rank) == (0x1000, 2)
    chosen = keys.assign(POOL, snapshot, generation(4), "user 1", ranks=4, rails=1, vfs=1)
    assert (chosen.pkey, chosen.first_rank) == (0x1000, 7)
    with_tombstone = replace(
        snapshot,
        assignments=(replace(snapshot.assignments[0], state=KeyState.TOMBSTONE), *snapshot.assignments[1:]),
    )
    assert keys.assign(POOL, with_tombstone, generation(4), "user 1", ranks=1, rails=1, vfs=1).pkey == 0x1002
    full = KeySnapshot(1, (an_assignment(1, owner="user 1", ranks=65536),))
    assert keys.assign(POOL, full, generation(4), "user 1", ranks=1, rails=1, vfs=1).pkey == 0x1001


def of_cluster(snapshot: KeySnapshot, ranks: int, limit: int = 65536) -> tuple[int, int]:
    chosen = keys.assign(POOL, snapshot, generation(9), "cluster 1", ranks=ranks, rails=1, vfs=1, limit=limit)
    return chosen.pkey, chosen.first_rank


def test_jobs_of_a_cluster_have_one_key_or_wait() -> None:
    first = an_assignment(1, owner="cluster 1", ranks=2, state=KeyState.ACTIVE)
    left = an_assignment(2, owner="cluster 1", first_rank=2, ranks=1, state=KeyState.QUARANTINE, left_s=9.0)
    snapshot = KeySnapshot(1, (first, left))
    assert of_cluster(snapshot, 3) == (0x1000, 3)
    with pytest.raises(keys.ExhaustedError, match=r"3 of 4 guests have it .* and the job has 2"):
        of_cluster(snapshot, 2, limit=4)
    lost = replace(left, state=KeyState.TOMBSTONE, note="n2 is silent")
    with pytest.raises(keys.ExhaustedError, match="may still use it: n2 is silent"):
        of_cluster(replace(snapshot, assignments=(first, lost)), 1)
    outside = KeySnapshot(1, (replace(first, pkey=0x2000),))
    with pytest.raises(keys.ExhaustedError, match="taken it out of the pool"):
        of_cluster(outside, 1)


@pytest.mark.parametrize("state", [KeyState.DRAINING, KeyState.TOMBSTONE, KeyState.QUARANTINE])
def test_a_cluster_without_jobs_gets_another_key(state: KeyState) -> None:
    assert of_cluster(KeySnapshot(1, (an_assignment(1, owner="cluster 1", state=state),)), 1) == (0x1001, 0)


def test_an_exhausted_pool_names_its_holders() -> None:
    states = (KeyState.ACTIVE, KeyState.QUARANTINE, KeyState.TOMBSTONE, KeyState.QUARANTINE)
    snapshot = KeySnapshot(
        1,
        tuple(
            an_assignment(number, pkey=0x1000 + number, state=state, left_s=10.0 * number)
            for number, state in enumerate(states)
        ),
    )
    with pytest.raises(
        FabricError, match=r"1 are in use, 2 in quarantine \(the next for 10 s\), 1 tombstones"
    ):
        keys.assign(POOL, snapshot, generation(9), "job 9", ranks=1, rails=1, vfs=1)


def test_an_assignment_follows_only_the_documented_states() -> None:
    drawn = {
        "reserved": "applied draining tombstone",
        "applied": "active draining tombstone",
        "active": "draining tombstone",
        "draining": "quarantine tombstone",
        "quarantine": "tombstone",
        "tombstone": "quarantine",
    }
    for state in KeyState:
        for to in KeyState:
            assignment = an_assignment(state=state)
            if to.value in drawn[state.value].split():
                assert keys.move(assignment, to).state is to
            else:
                with pytest.raises(keys.KeyTransitionError):
                    keys.move(assignment, to)


# --- the database ----------------------------------------------------------------------------


@pytest.fixture
def store(leases_at: Place) -> Iterator[SqlStore]:
    found = open_at(leases_at)
    yield found
    found.close()


def test_assignments_survive_reopening_and_changes_count(store: SqlStore, leases_at: Place) -> None:
    with store.transaction():
        store.keys.add(an_assignment(1))
        store.keys.add(an_assignment(2, pkey=0x1001))
        store.keys.update([an_assignment(1, state=KeyState.QUARANTINE, left_s=2.5, note="ü")])
        store.keys.free([generation(2)])
    store.close()
    snapshot = open_at(leases_at).keys.snapshot()
    assignments = (an_assignment(1, state=KeyState.QUARANTINE, left_s=2.5, note="ü"),)
    assert replace(snapshot, tag="") == KeySnapshot(4, assignments, {0x1001: 4})


def test_an_old_copy_of_the_database_is_recognized(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "leases.sqlite")
    with store.transaction():
        store.keys.add(an_assignment(1))
    store._db.execute("VACUUM INTO ?", (str(tmp_path / "copy"),))
    common = store.keys.snapshot()
    copy = SqliteStore(tmp_path / "copy")
    for one in (store, copy):
        with one.transaction():
            one.keys.add(an_assignment(2, pkey=0x1001))
    later = store.keys.snapshot()
    assert later.epoch == copy.keys.snapshot().epoch == 2
    assert copy.keys.knows(common.epoch, common.tag)
    assert store.keys.knows(later.epoch, later.tag)
    assert not copy.keys.knows(later.epoch, later.tag)


def test_the_database_refuses_a_second_owner_of_a_key(store: SqlStore) -> None:
    with store.transaction():
        store.keys.add(an_assignment(1, owner="user 1"))
    with pytest.raises(FabricError, match="another owner has it"), store.transaction():
        store.keys.add(an_assignment(2, owner="user 2", first_rank=9))
    with store.transaction():
        store.keys.add(an_assignment(2, owner="user 1", first_rank=9))
        store.keys.free([generation(1)])
    with pytest.raises(FabricError, match="another owner has it"), store.transaction():
        store.keys.add(an_assignment(3, owner="user 2"))
    with store.transaction():
        store.keys.free([generation(2)])
        store.keys.add(an_assignment(3, owner="user 2"))
    assert [assignment.owner for assignment in store.keys.snapshot().assignments] == ["user 2"]


def test_a_guid_that_is_another_s_is_refused(store: SqlStore) -> None:
    with store.transaction():
        store.keys.add(an_assignment(1, owner="user 1", first_rank=4, ranks=2))
    for first, ranks in ((4, 1), (5, 1), (0, 5), (0, 100)):
        with pytest.raises(FabricError, match="cannot have its GUIDs"), store.transaction():
            store.keys.add(an_assignment(2, owner="user 1", first_rank=first, ranks=ranks))
    with store.transaction():
        store.keys.add(an_assignment(2, owner="user 1", first_rank=0, ranks=4))
        store.keys.add(an_assignment(3, owner="user 1", first_rank=6, ranks=1))


def test_a_port_with_its_own_guid_has_one_owner_until_release(store: SqlStore) -> None:
    first = an_assignment(1, ports=(0x0002_C903_0000_0101, 0xFEFF_FF00_0000_0001))
    other = an_assignment(2, pkey=0x1001, ranks=1, ports=(0xFEFF_FF00_0000_0001,))
    with store.transaction():
        store.keys.add(first)
    assert store.keys.snapshot().assignments == (first,)
    assert store.keys.snapshot().ports_held() == set(first.ports)
    for state in (KeyState.DRAINING, KeyState.TOMBSTONE):
        with store.transaction():
            store.keys.update([replace(first, state=state)])
        with pytest.raises(FabricError, match="cannot have its GUIDs"), store.transaction():
            store.keys.add(other)
    with store.transaction():
        store.keys.update([replace(first, state=KeyState.QUARANTINE, left_s=9.0)])
        store.keys.add(other)
    assert store.keys.snapshot().ports_held() == {0xFEFF_FF00_0000_0001}


def test_an_assignment_goes_with_its_lease_or_not_at_all(store: SqlStore) -> None:
    with pytest.raises(RuntimeError), store.transaction():  # noqa: PT012 - what was done before it
        store.keys.add(an_assignment())
        raise RuntimeError
    assert store.keys.snapshot() == KeySnapshot(0)


# --- leases and their assignments -----------------------------------------------------------------


def test_a_tombstone_stays_until_the_node_is_clean(tmp_path: Path) -> None:
    now = [0.0]
    fabric = Fabric(KeyPolicy(KeyPool(0x1000, 0x1000)))
    store = SqliteStore(tmp_path / "db")
    service = Alone(store, fabric, reserve_mib=0, quarantine_s=5.0, steady=lambda: now[0])
    first = service.open(request(1), allocation("n1"), identity(0)).lease
    assert first.network == NetworkIdentity("ib", pkey=0x1000, rails=1, vfs=1)
    assert fabric.tables == {0x02CC_1000_0000_0000: 0x1000}
    service.take(1, 0, "n1")
    service.end(1, 0)
    service.acknowledge(first.generation, "n1", clean=False, note="VF still bound", timeline=None)
    now[0] += 1000
    service.settle()
    (assignment,) = store.keys.snapshot().assignments
    assert (assignment.state, assignment.note) == (KeyState.TOMBSTONE, "n1: VF still bound")
    with pytest.raises(FabricError, match="1 tombstones"):
        service.open(request(2), allocation("n1"), identity(0))
    service.acknowledge(first.generation, "n1", clean=True, note="", timeline=None)
    assert fabric.tables == {}
    with pytest.raises(FabricError, match=r"1 in quarantine \(the next for 5 s\)"):
        service.open(request(2), allocation("n1"), identity(0))
    now[0] += 5
    assert service.open(request(2), allocation("n1"), identity(0)).lease.network.pkey == 0x1000


def test_time_before_a_quarantine_does_not_count_for_it(tmp_path: Path) -> None:
    now = [0.0]
    service = Alone(
        SqliteStore(tmp_path / "db"),
        Fabric(KeyPolicy(KeyPool(0x1000, 0x1000))),
        reserve_mib=0,
        quarantine_s=5.0,
        steady=lambda: now[0],
    )
    service.open(request(1), allocation("n1"), identity(0))
    now[0] += 4.0
    service.end(1, 0)
    now[0] += 4.0
    with pytest.raises(FabricError, match="the next for 1 s"):
        service.open(request(2), allocation("n1"), identity(0))


def test_a_changed_wall_clock_changes_no_state_of_keys(tmp_path: Path) -> None:
    steady, wall = [0.0], [1e9]
    service = Alone(
        SqliteStore(tmp_path / "db"),
        Fabric(KeyPolicy(KeyPool(0x1000, 0x1001))),
        reserve_mib=0,
        quarantine_s=5.0,
        lost_after_s=5.0,
        clock=lambda: wall[0],
        steady=lambda: steady[0],
    )

    def states() -> list[str]:
        return sorted(assignment.state.value for assignment in service.store.keys.snapshot().assignments)

    service.open(request(1), allocation("n1"), identity(0))
    service.open(request(2), allocation("n1"), identity(0))
    service.take(2, 0, "n1")
    for job_id in (1, 2):
        service.end(job_id, 0)
    for step in (1e8, -2e8, 1e9):
        wall[0] += step
        service.settle()
        assert states() == ["draining", "quarantine"]
    steady[0] += 5
    service.settle()
    assert states() == ["tombstone"]


def test_a_fabric_with_the_keys_of_ready_jobs_is_not_changed(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Alone(store, Fabric(KeyPolicy(POOL)), reserve_mib=0)
    lease = service.open(request(1), allocation("n1"), identity(0)).lease
    told = service.batches.changes
    service.batches.run()
    assert service.batches.changes == told
    # its key was proven, so the first audit already knows whose key a port lacks
    owners: list[dict[int, Generation]] = []
    monkeypatch.setattr(service.audit.watch, "saw", lambda _found, _trouble, holders: owners.append(holders))
    service.audit.run()
    assert owners == [{0x02CC_1000_0000_0000: lease.generation}]
    assert service.batches.changes == told


def test_an_assignment_without_a_lease_becomes_a_tombstone(store: SqlStore) -> None:
    service = Alone(store, Fabric(KeyPolicy(POOL)), reserve_mib=0)
    with store.transaction():
        store.keys.add(an_assignment(1, state=KeyState.ACTIVE))
    service.settle()
    assert [assignment.state for assignment in store.keys.snapshot().assignments] == [KeyState.TOMBSTONE]


def test_no_network_does_not_serve_while_keys_are_in_use() -> None:
    NoNetwork().validate(KeySnapshot(1, (an_assignment(state=KeyState.QUARANTINE),)))
    with pytest.raises(FabricError, match="1 partition keys are in use"):
        NoNetwork().validate(KeySnapshot(1, (an_assignment(state=KeyState.ACTIVE),)))
