# SPDX-License-Identifier: Apache-2.0
"""The plan of a campaign: a pure function of its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from campaign.faults import FAULTS, Fault
from campaign.kinds import KINDS, Kind

USERS = ("alice", "bob")
NAT_KINDS = {"nat", "both-networks"}
LIGHT_PACE = 0.3
"""Pauses on a light lab: a guest is there in a part of the time that one needs to boot."""
ENDERS = 6
"""On a light lab one of so many faults ends a daemon."""


@dataclass(frozen=True)
class PlannedJob:
    """A job: its user waits ``pause_s`` before he submits it, and ``delay_s`` before he acts on it."""

    number: int
    kind: str
    user: str
    pause_s: float
    delay_s: float

    @property
    def name(self) -> str:
        """Its name in Slurm, which finds everything of it again: ids are not unique after faults."""
        return f"c{self.number:03d}-{self.kind}"


@dataclass(frozen=True)
class PlannedFault:
    """A fault: after so many jobs were submitted, and ``pause_s``.

    ``pick`` (from 0, less than 1) chooses among the targets at that moment,
    ``delay_s`` is how long after it was found, ``hold_s`` how long until the
    fault is undone.
    """

    number: int
    kind: str
    after: int
    pause_s: float
    pick: float
    delay_s: float
    hold_s: float


@dataclass(frozen=True)
class Plan:
    """The whole campaign."""

    seed: int
    jobs: tuple[PlannedJob, ...]
    faults: tuple[PlannedFault, ...]
    attacked: bool = False
    """All jobs are bob's, and alice attacks meanwhile."""
    light: bool = False
    """For a lab without real guests."""

    def without_nat(self) -> Plan:
        """The same with jobs that have no nat, for nodes without a passt that can do it."""
        jobs = (replace(job, kind="network") if job.kind in NAT_KINDS else job for job in self.jobs)
        return replace(self, jobs=tuple(jobs))

    def without_pmix(self) -> Plan:
        """The same with PMI-2 in place of PMIx, for a Slurm without libpmix."""
        jobs = (replace(job, kind="pmi2") if job.kind == "pmix" else job for job in self.jobs)
        return replace(self, jobs=tuple(jobs))


def draw(
    seed: int, jobs: int, faults: int, *, short: bool = False, attacked: bool = False, light: bool = False
) -> Plan:
    """Draw a campaign.

    Kinds come from decks that are shuffled again when they are used up, so that
    a campaign of some length holds all of them.  ``short`` leaves out what
    takes minutes; in an ``attacked`` one all jobs are of the user who is not
    the attacker; a ``light`` one is for a lab without real guests.
    """
    users = USERS[1:] if attacked else USERS
    dice = random.Random(seed)
    kinds = [one for one in KINDS.values() if not ((short and one.long) or (light and one.needs_guest))]
    hits = [one for one in FAULTS.values() if not ((short and one.long) or (light and one.needs_guest))]
    drawn = _draw(dice, kinds, jobs)
    pace = LIGHT_PACE if light else 1.0
    moments = _light_moments(dice, hits, jobs, faults) if light else _moments(dice, hits, jobs, faults)
    return Plan(
        seed,
        tuple(
            PlannedJob(
                number,
                kind,
                dice.choice(users),
                _seconds(dice, 0, 2 * pace),
                _seconds(dice, 0, 8 * pace),
            )
            for number, kind in enumerate(drawn)
        ),
        tuple(
            PlannedFault(
                number,
                kind,
                after,
                pause_s=_seconds(dice, 0, 3 * pace),
                pick=min(round(dice.random(), 3), 0.999),
                delay_s=_seconds(dice, 0, FAULTS[kind].delay_s * pace),
                hold_s=_seconds(dice, 0, FAULTS[kind].hold_s),
            )
            for number, (after, kind) in enumerate(moments)
        ),
        attacked,
        light,
    )


def _moments(dice: random.Random, hits: Sequence[Fault], jobs: int, faults: int) -> list[tuple[int, str]]:
    """Faults, each after so many jobs."""
    drawn = _draw(dice, hits, faults)
    return [((number + 1) * jobs // (faults + 1), kind) for number, kind in enumerate(drawn)]


def _light_moments(
    dice: random.Random, hits: Sequence[Fault], jobs: int, faults: int
) -> list[tuple[int, str]]:
    """As ``_moments``; those that end a daemon come in the first third of the jobs.

    The daemons' resources are compared between the other thirds (trends.py),
    so each daemon lives through both.
    """
    enders = faults // ENDERS
    moments = _moments(dice, [hit for hit in hits if hit.ends_daemon], jobs // 3, enders)
    moments += _moments(dice, [hit for hit in hits if not hit.ends_daemon], jobs, faults - enders)
    return sorted(moments, key=lambda moment: moment[0])


def _draw(dice: random.Random, choice: Sequence[Kind | Fault], count: int) -> list[str]:
    drawn: list[str] = []
    while len(drawn) < count:
        deck = [card.name for card in choice for _ in range(card.weight)]
        dice.shuffle(deck)
        drawn += deck
    return drawn[:count]


def _seconds(dice: random.Random, low: float, high: float) -> float:
    return round(dice.uniform(low, high), 2)
