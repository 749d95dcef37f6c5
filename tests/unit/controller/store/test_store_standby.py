# SPDX-License-Identifier: Apache-2.0
"""Several vhpcd at one database: which one may write, and when another one takes over."""

from __future__ import annotations

import itertools

import mariadb_server
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lease_records import record
from mariadb_server import emptied, shared
from store_backends import ME

from pace import examples
from vhpc_slurm.config.database import Database
from vhpc_slurm.controller.store import writership
from vhpc_slurm.controller.store.mariadb import MariaDatabase
from vhpc_slurm.controller.store.mariastore import MariaStore
from vhpc_slurm.controller.store.standby import Standby
from vhpc_slurm.controller.store.writership import STEP_DOWN_S, TAKEOVER_S, FencedError
from vhpc_slurm.errors import FabricError

pytestmark = [
    pytest.mark.promise("ha.one-active"),
    pytest.mark.skipif(not mariadb_server.HAVE_SERVER, reason=mariadb_server.WHY_NOT),
]


class Clock:
    """A clock that the test sets, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(writership, "uptime_s", found)
    return found


@pytest.fixture
def settings() -> Database:
    return shared().database()


def standby(settings: Database, name: str, clock: Clock) -> Standby:
    return Standby(settings, ME, name, clock)


def taken(one: Standby) -> MariaStore:
    found = one.take()
    assert found is not None
    return found


def put(store: MariaStore, job: int) -> None:
    with store.transaction():
        store.put(record(job))


def renew(store: MariaStore) -> None:
    with store.transaction():
        store.renew()


def row(settings: Database) -> tuple[int, int, str]:
    (found,) = shared().query("SELECT epoch, serial, holder FROM vhpc_writer", settings.name)
    return found[0], found[1], found[2]


def test_a_new_database_is_taken_by_one_of_two_at_once(settings: Database, clock: Clock) -> None:
    first, second = standby(settings, "a:1", clock), standby(settings, "b:1", clock)
    store = taken(first)
    assert second.take() is None
    assert second.holder == "a:1"
    put(store, 1)


def test_a_standby_waits_while_the_active_one_renews(settings: Database, clock: Clock) -> None:
    store, other = taken(standby(settings, "a:1", clock)), standby(settings, "b:1", clock)
    for _ in range(20):
        clock.now += 1.0
        renew(store)
        assert other.take() is None


def test_a_standby_takes_over_when_nothing_has_changed(settings: Database, clock: Clock) -> None:
    old, other = taken(standby(settings, "a:1", clock)), standby(settings, "b:1", clock)
    assert other.take() is None
    clock.now += TAKEOVER_S - 0.1
    assert other.take() is None
    clock.now += 0.1
    new = taken(other)
    assert new.writership.epoch > old.writership.epoch
    with pytest.raises(FencedError):
        put(old, 1)
    with pytest.raises(FencedError):
        renew(old)
    put(new, 2)
    assert [one.lease.generation.job_id for one in new.live()] == [2]


def test_a_standby_that_has_just_begun_waits_the_whole_time(settings: Database, clock: Clock) -> None:
    taken(standby(settings, "a:1", clock))
    clock.now += 1000.0
    other = standby(settings, "b:1", clock)
    assert other.take() is None
    clock.now += TAKEOVER_S
    taken(other)


def test_a_vhpcd_that_ends_leaves_the_database_at_once(settings: Database, clock: Clock) -> None:
    store, other = taken(standby(settings, "a:1", clock)), standby(settings, "b:1", clock)
    assert other.take() is None
    store.close()
    taken(other)


def test_a_restarted_vhpcd_takes_its_hosts_database_at_once(settings: Database, clock: Clock) -> None:
    taken(standby(settings, "a:1", clock))
    taken(standby(settings, "a:2", clock))


def test_two_standbys_never_both_take_over(settings: Database, clock: Clock) -> None:
    taken(standby(settings, "a:1", clock))
    others = [standby(settings, f"{name}:1", clock) for name in "bcd"]
    assert [one.take() for one in others] == [None] * 3
    clock.now += TAKEOVER_S
    assert [one.take() is not None for one in others] == [True, False, False]


@pytest.mark.promise("ha.takeover")
def test_a_vhpcd_frozen_in_a_transaction_is_replaced_in_time(settings: Database, clock: Clock) -> None:
    old, other = taken(standby(settings, "a:1", clock)), standby(settings, "b:1", clock)
    assert other.take() is None
    with pytest.raises(FabricError), old.transaction():  # noqa: PT012 - frozen between its change and its end
        old.put(record(1))
        clock.now += TAKEOVER_S
        new = taken(other)
    put(new, 2)
    with pytest.raises(FencedError):
        put(old, 3)
    assert [one.lease.generation.job_id for one in new.live()] == [2]


def test_the_age_counts_from_before_a_change_was_sent(settings: Database, clock: Clock) -> None:
    store = taken(standby(settings, "a:1", clock))
    assert store.writership.age_s == 0.0
    clock.now += 5.0
    with store.transaction():
        store.renew()
        clock.now += 2.0  # the server answers COMMIT late
    assert store.writership.age_s == 2.0
    clock.now += 3.0
    list(store.live())
    assert store.writership.age_s == 5.0, "reading renews nothing"


def test_epochs_rise_also_with_a_new_database(clock: Clock) -> None:
    first = taken(standby(shared().database(), "a:1", clock))
    second = taken(standby(shared().database(), "b:1", clock))
    assert second.writership.epoch >= first.writership.epoch > 1_700_000_000


def test_the_duration_of_service_ends_before_another_may_begin() -> None:
    assert writership.RENEW_S < STEP_DOWN_S < 0.8 * TAKEOVER_S


# --- any order of freezing, thawing, cutting and taking over ---------------------------------------


class Failover(RuleBasedStateMachine):
    """Three vhpcd with clocks of their own, which run at slightly different rates."""

    _numbers = itertools.count(1)
    _settings: Database | None = None

    def __init__(self) -> None:
        super().__init__()
        if Failover._settings is None:
            Failover._settings = shared().database()
            MariaStore(Failover._settings, ME).close()
        self.settings = emptied(Failover._settings)
        shared().query("UPDATE vhpc_writer SET holder = ''", self.settings.name)
        self.names = ("a", "b", "c")
        self.rates = dict(zip(self.names, (0.95, 1.0, 1.05), strict=True))
        self.clocks = {name: Clock() for name in self.names}
        self.stores: dict[str, MariaStore] = {}
        self.frozen: set[str] = set()
        self.cut: set[str] = set()
        self.written: list[int] = []
        self.last_epoch = 0

    @initialize()
    def begin(self) -> None:
        self.waiting = {name: self._standby(name) for name in self.names}

    def _standby(self, name: str) -> Standby:
        return Standby(self.settings, ME, f"{name}:1", self.clocks[name])

    def _serves(self, name: str) -> bool:
        return name in self.stores and self.stores[name].writership.age_s < STEP_DOWN_S

    @rule(seconds=st.floats(0.1, 12.0))
    def time_passes(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.5) + 1):
            for name in self.names:
                self.clocks[name].now += seconds / (int(seconds / 0.5) + 1) * self.rates[name]
            for name in self.names:
                self._act(name)

    def _act(self, name: str) -> None:
        """The work that a running process does by itself."""
        if name in self.frozen:
            return
        if name in self.stores:
            if not self._serves(name):
                self._step_down(name)
            elif name not in self.cut:
                self._write(name)
        elif name not in self.cut and (store := self.waiting[name].take()) is not None:
            store.writership._clock = self.clocks[name]
            store.writership._renewed_at = self.clocks[name]()
            assert store.writership.epoch > self.last_epoch, "epochs rise"
            self.last_epoch = store.writership.epoch
            assert not [one for one in self.stores if self._serves(one)], "two serve at a time"
            self.stores[name] = store

    def _write(self, name: str) -> None:
        job = next(self._numbers)
        try:
            put(self.stores[name], job)
        except FabricError:
            assert self.stores[name].writership.epoch < self.last_epoch
            self._step_down(name)
            return
        assert self.stores[name].writership.epoch == self.last_epoch, "a lower epoch has written"
        self.written.append(job)

    def _step_down(self, name: str) -> None:
        self.stores.pop(name)._maria.close()
        self.waiting[name] = self._standby(name)

    @rule(name=st.sampled_from("abc"))
    def freeze(self, name: str) -> None:
        self.frozen.add(name)

    @precondition(lambda self: self.frozen)
    @rule(data=st.data())
    def thaw(self, data: st.DataObject) -> None:
        """The first thing that a thawed process does may be a write, before it has looked at a clock."""
        name = data.draw(st.sampled_from(sorted(self.frozen)))
        self.frozen.remove(name)
        if name in self.stores and name not in self.cut:
            self._write(name)

    @rule(name=st.sampled_from("abc"))
    def cut_from_the_database(self, name: str) -> None:
        self.cut ^= {name}

    @invariant()
    def every_confirmed_lease_is_there(self) -> None:
        found = shared().query("SELECT job_id FROM lease", self.settings.name)
        assert sorted(job for (job,) in found) == sorted(self.written)

    def teardown(self) -> None:
        for store in self.stores.values():
            store._maria.close()
        for one in self.waiting.values():
            one.close()


TestFailover = pytest.mark.long(
    hypothesis_settings(max_examples=examples(25), stateful_step_count=20, deadline=None)(Failover).TestCase
)


def test_ended_sessions_are_those_of_this_database_only(settings: Database, clock: Clock) -> None:
    taken(standby(settings, "a:1", clock))
    other = MariaDatabase(shared().database(), ME)
    (number,) = other.execute("SELECT CONNECTION_ID()").fetchone()
    taken(standby(settings, "a:2", clock))
    assert other.execute("SELECT CONNECTION_ID()").fetchone() == (number,)
    other.close()
