# SPDX-License-Identifier: Apache-2.0
"""A follower with a vhpcd that follows a script, and a network and guests that note what they get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as changed

from vhpc_slurm.errors import FabricError
from vhpc_slurm.hooks.followerport import Setting
from vhpc_slurm.hooks.following import Follower
from vhpc_slurm.hooks.interrupts import Terminated, Woken
from vhpc_slurm.model import ClusterMember, Generation, Roster, Segment, SegmentPart
from vhpc_slurm.node.store.membership import Membership

GENERATION = Generation(42, 0, "0123abcd")
AWAY = FabricError("vhpcd does not answer")
Turn = Roster | BaseException | Callable[[], Roster]


def member(job_id: int, *nodes: str, first: int = 0, gone: tuple[int, ...] = ()) -> ClusterMember:
    """A job with one guest on each node; its VNI is 5000 + the job's number."""
    generation = Generation(job_id, 0, "0123abcd")
    part = SegmentPart(generation, nodes, (2,) * len(nodes), 1)
    underlay = tuple(f"192.0.2.{node.removeprefix('n')}" for node in nodes)
    segment = Segment(5000 + job_id, "10.200.0.0/16", "fd76:6870:6300::/64", 7634, 0, underlay, first=first)
    return ClusterMember(generation, segment, (part,), f"host key {job_id}", f"user key {job_id}", gone)


OWN = member(42, "n1")
OVER = Roster(0, over=True)


@dataclass
class Rig:
    """Everything around a follower.

    Attributes:
        script: what vhpcd answers to each question; afterwards OVER.
        asked: (applied, gone, wait_s) of each question.
        events: what network and guests got, in order: jobs of the other members.
        refusing: the next errors of the network.
        silent: guests that do not take what they are told, for each of the next times.
        ended: ranks of guests that have ended.
    """

    script: list[Turn] = field(default_factory=list)
    asked: list[tuple[int, tuple[int, ...], float]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    refusing: list[Exception] = field(default_factory=list)
    silent: list[tuple[str, ...]] = field(default_factory=list)
    ended: tuple[int, ...] = ()
    own: ClusterMember = OWN
    others: tuple[ClusterMember, ...] = ()
    version: int = 0
    now: float = 1000.0
    chance: float = 1.0
    tombstone: bool = False
    waking: bool = False
    terminated: bool = False

    def run(self) -> bool:
        known = Membership("mesh", 1000, self.own, self.version, self.others)
        setting = Setting(GENERATION, "n1")
        self.follower = Follower(
            setting, known, self, self, self, self, clock=lambda: self.now, chance=lambda: self.chance
        )
        return self.follower.run()

    # --- vhpcd ----------------------------------------------------------------

    def roster(
        self, generation: Generation, node: str, applied: int, gone: tuple[int, ...], wait_s: float
    ) -> Roster:
        assert (generation, node) == (GENERATION, "n1")
        self.asked.append((applied, gone, wait_s))
        turn: Turn = self.script.pop(0) if self.script else OVER
        if isinstance(turn, BaseException):
            raise turn
        answer = turn if isinstance(turn, Roster) else turn()
        if not (answer.members or answer.left or answer.more or answer.over):
            self.now += wait_s
        return answer

    # --- network and guests -----------------------------------------------------

    def follow(self, known: Membership) -> None:
        if self.refusing:
            self.events.append("refused")
            raise self.refusing.pop(0)
        self.events.append(f"network {known.version}: {jobs(known)}")

    def all(self) -> tuple[int, ...]:
        return tuple(range(len(self.own.segment_nodes)))

    def gone(self) -> tuple[int, ...]:
        return self.ended

    def tell(self, known: Membership) -> tuple[str, ...]:
        self.events.append(f"guests {known.version}: {jobs(known)}")
        return self.silent.pop(0) if self.silent else ()

    # --- process --------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        self._stop()
        self.pauses.append(seconds)
        self.now += seconds

    def ask(self, question: Callable[[], Roster]) -> Roster:
        self._stop()
        return question()

    def briefly(self, question: Callable[[], Roster], seconds: float) -> None:
        assert seconds < 2.0
        question()

    def job_ends(self) -> bool:
        return self.tombstone

    def ends(self, *ranks: int) -> Callable[[], Roster]:
        """A turn of the script: guests end while the question waits."""

        def turn() -> Roster:
            self.ended = ranks
            raise Woken

        return turn

    def terminate(self, *, tombstone: bool) -> Callable[[], Roster]:
        """A turn of the script: SIGTERM comes while the question waits."""

        def turn() -> Roster:
            self.tombstone = tombstone
            raise Terminated

        return turn

    def _stop(self) -> None:
        if self.terminated:
            raise Terminated


def jobs(known: Membership) -> str:
    return " ".join(str(one.generation.job_id) for one in known.others)


def with_gone(one: ClusterMember, *ranks: int) -> ClusterMember:
    return changed(one, gone=ranks)
