# SPDX-License-Identifier: Apache-2.0
"""Thirty days of vhpcd with clocks of the test: what expires does so as documented, and never early.

The wall clock is set by up to an hour in both directions, and vhpcd is restarted, all the time.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest
from controller_lab import Alone, allocation, identity, request
from store_backends import Place, open_at

from vhpc_slurm.config.network import Network
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.backend import KeyPolicy, NoNetwork, ProofResults
from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.model import ALARM, Generation, LeaseState

pytestmark = pytest.mark.long

DAY_S, TICK_S = 86400.0, 900.0
TICKS = int(30 * DAY_S / TICK_S)
KEY_S, VNI_S, HISTORY_S, ALARM_S = 7200.0, 5400.0, 5 * DAY_S, 7 * DAY_S
KEYS, VNIS = range(0x1000, 0x1006), range(5000, 5006)
STARTED = 1_800_000_000.0


class Keys(NoNetwork):
    """A fabric that takes whatever it is told."""

    plan = KeyPolicy(KeyPool(KEYS[0], KEYS[-1])).plan

    def strip(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        return self.verify(generations, snapshot)


@dataclass
class Job:
    """A lease as the test knows it; ``ran_s``: seconds that vhpcd had run when it was released."""

    generation: Generation
    pkey: int
    vni: int
    released: float = 0.0
    ran_s: float = 0.0


class Month:
    """vhpcd, its two clocks, and a model of what it must remember."""

    def __init__(self, where: Place, seed: int) -> None:
        self.where = where
        self.random = random.Random(seed)
        self.wall, self.steady, self.ran_s = STARTED, 0.0, 0.0
        self.running: list[Job] = []
        self.over: list[Job] = []
        self.forgotten: set[Generation] = set()
        self.alarms: list[tuple[int, float]] = []
        self.number = self.refused = 0
        self.begin()

    def begin(self) -> None:
        self.vhpcd = Alone(
            open_at(self.where),
            Keys(),
            reserve_mib=64,
            quarantine_s=KEY_S,
            job_network=Network(
                allowed=("none", "job"), vni_first=VNIS[0], vni_last=VNIS[-1], quarantine_s=int(VNI_S)
            ),
            clock=lambda: self.wall,
            steady=lambda: self.steady,
        )

    def restart(self) -> None:
        """vhpcd is away for a while, which counts for no quarantine; its monotonic clock starts again."""
        self.vhpcd.settle()
        self.vhpcd.store.close()
        self.wall += self.random.uniform(0, 4 * 3600)
        self.steady = self.random.uniform(0, 1e6)
        self.begin()

    def tick(self) -> None:
        self.tick_without_jobs()
        if self.random.random() < 0.01:
            self.wall += self.random.uniform(-3600, 3600)
        if self.random.random() < 0.01:
            self.restart()
        self.vhpcd.settle()
        self.vhpcd.prune(HISTORY_S)
        self.forgotten |= {job.generation for job in self.over if job.released < self.wall - HISTORY_S}
        self.check()
        for job in [job for job in self.running if self.random.random() < 0.2]:
            self.end(job)
        while len(self.running) < 3 and self.random.random() < 0.5:
            self.start()

    def tick_without_jobs(self) -> None:
        self.wall += TICK_S
        self.steady += TICK_S
        self.ran_s += TICK_S
        self.vhpcd.settle()

    def start(self) -> None:
        self.number += 1
        wanted = request(self.number, network="job")
        busy = {job.pkey for job in self.running} | {job.pkey for job in self.resting(KEY_S - 1)}
        used = {job.vni for job in self.running} | {job.vni for job in self.resting(VNI_S - 1)}
        try:
            lease = self.vhpcd.open(wanted, allocation("n1", "n2"), identity()).lease
        except FabricError:
            busy |= {job.pkey for job in self.resting(KEY_S + 1)}  # a clock's numbers are not exact
            used |= {job.vni for job in self.resting(VNI_S + 1)}
            assert busy == set(KEYS) or used == set(VNIS), "what rests no more is free again"
            self.refused += 1
            return
        assert lease.segment is not None
        assert lease.network.pkey is not None
        job = Job(lease.generation, lease.network.pkey & 0x7FFF, lease.segment.vni)
        assert job.pkey not in busy, "a key that is in use or rests"
        assert job.vni not in used, "a VNI that is in use or rests"
        self.running.append(job)
        for node in ("n1", "n2"):
            assert self.vhpcd.take(self.number, 0, node) is not None

    def resting(self, quarantine_s: float) -> list[Job]:
        """Ended jobs whose number must not be used yet."""
        return [job for job in self.over if self.ran_s - job.ran_s < quarantine_s]

    def end(self, job: Job) -> None:
        self.running.remove(job)
        self.vhpcd.end(job.generation.job_id, None)
        for node in ("n1", "n2"):
            note = f"{ALARM}QEMU refused it" if self.random.random() < 0.05 else ""
            self.vhpcd.acknowledge(job.generation, node, clean=True, note=note, timeline=None)
            if note:
                self.alarms.append((job.generation.job_id, self.wall))
        job.released, job.ran_s = self.wall, self.ran_s
        self.over.append(job)

    def check(self) -> None:
        """The history and the alarms are what they have to be."""
        store = self.vhpcd.store
        for job in self.over:
            if abs(job.released - (self.wall - HISTORY_S)) > 2 * 3600:
                continue  # not near the end of its time
            state = store.state(job.generation)
            assert state is (None if job.generation in self.forgotten else LeaseState.RELEASED)
        assert {job.generation for job in self.running} == set(store.states())
        shown = {(alarm.job_id, alarm.time) for alarm in self.vhpcd.alarms()}
        due = {(job, at) for job, at in self.alarms if at > self.wall - ALARM_S}
        assert {job for job, _ in shown} <= {job for job, _ in due}, "older than a week"
        kept = {job for job, _ in due if not any(g.job_id == job for g in self.forgotten)}
        assert kept <= {job for job, _ in shown}, "not a week old"


@pytest.mark.promise("net.thirty-days")
def test_thirty_days_of_jobs_clock_steps_and_restarts(tmp_path: Path) -> None:
    month = Month(tmp_path / "leases.sqlite", seed=30)
    for _ in range(TICKS):
        month.tick()
    assert month.number - month.refused > 500, "or the month shows little"
    assert month.refused > 5, "numbers were short at times, so a rest that never ends would show"
    assert len(month.forgotten) > 200
    assert month.alarms
    for job in list(month.running):
        month.end(job)
    for _ in range(int(max(KEY_S, VNI_S) / TICK_S) + 1):
        month.tick_without_jobs()
    snapshot = month.vhpcd.store.keys.snapshot()
    assert snapshot.assignments == ()
    assert month.vhpcd.store.segments.held() == ()
    month.vhpcd.store.close()
