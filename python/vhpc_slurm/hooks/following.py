# SPDX-License-Identifier: Apache-2.0
"""The follower's rules: it asks vhpcd who is in the cluster, and tells network and guests of a node.

vhpcd answers with the changes since the version that this node has; so each question also says what this node
has done, and no answer may be lost. Ended guests are reported with each question: the network of the other
members forgets them. Without an answer everything stays as it is.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from vhpc_slurm.hooks.followerport import Guests, Network, Process, Setting, Vhpcd
from vhpc_slurm.hooks.interrupts import Terminated, Woken, error_line
from vhpc_slurm.hooks.pacing import ASK_S, PACE_S, RETRY_S
from vhpc_slurm.model import Generation, Roster
from vhpc_slurm.node.store.membership import Membership

log = logging.getLogger("vhpc")

TELL_AGAIN_S = 30.0
"""The pause after a guest did not take what it was told."""
AWAY_S, AWAY_MOST_S = 1.0, 5.0
"""The longest pause after a question without an answer, which doubles; nodes must not come back in step."""
LEAVE_S = 1.5
"""How long vhpcd may take for the last report; Epilog waits a little longer for the follower."""


class Follower(Struct):
    """Applies what vhpcd says of a cluster to the network and the guests of a member on this node.

    ``known`` is what vhpcd has said; at the start what an earlier follower has applied to the network.
    """

    setting: Setting
    known: Membership
    vhpcd: Vhpcd
    network: Network
    guests: Guests
    process: Process
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random
    _applied: int = 0
    _heard: bool = False
    _pending: bool = False
    _failed: str = ""
    _tell_at: float | None = None
    _away_s: float = 0.0

    def run(self) -> bool:
        """Work until the job ends, or until SIGTERM; True if vhpcd has said that it is no member any more."""
        self._pending = self._heard = self.known.version > 0
        try:
            while not self.process.job_ends():
                try:
                    if not self._step():
                        return True
                except Woken:
                    continue  # the next question reports the guest that has ended
        except Terminated:
            if not self.process.job_ends():
                log.warning("follower: it is ended by SIGTERM while the job runs")
                return False
        self._leave()
        return False

    def _step(self) -> bool:
        """Apply what is known, ask once, and note the answer; False if this job is no member any more."""
        if self._pending:
            self._apply()
        elif self._tell_at is not None and self.clock() >= self._tell_at:
            self._tell()
        began = self.clock()
        answer = self._ask()
        if answer is None:
            self.process.pause(self._away_s * (0.5 + 0.5 * self.chance()))
            return True
        if answer.over:
            log.info("follower: the job is no member of cluster %s any more", self.known.name)
            return False
        news = self._note(answer)
        if self._failed:
            self.process.pause(RETRY_S)
        elif not news and (left := PACE_S - (self.clock() - began)) > 0:
            self.process.pause(left)
        return True

    # --- vhpcd ----------------------------------------------------------------

    def _ask(self) -> Roster | None:
        """Report and ask; None if vhpcd does not answer."""
        setting, wait_s = self.setting, ASK_S
        if self._pending:
            wait_s = 0.0
        elif self._tell_at is not None:
            wait_s = max(0.0, min(ASK_S, self._tell_at - self.clock()))
        gone = self.guests.gone()
        try:
            answer = self.process.ask(
                lambda: self.vhpcd.roster(setting.generation, setting.node, self._applied, gone, wait_s)
            )
        except Exception as err:
            if not self._away_s:
                log.warning("follower: vhpcd does not say who is in the cluster: %s", error_line(err))
            self._away_s = min(AWAY_MOST_S, max(AWAY_S, 2 * self._away_s))
            return None
        if self._away_s:
            log.info("follower: vhpcd answers again")
            self._away_s = 0.0
        return answer

    def _note(self, answer: Roster) -> bool:
        """Add the changes to what is known; whether there were any."""
        if answer.version < self._applied:
            log.warning("follower: vhpcd has an earlier version of the cluster: it is asked for all members")
            self.known, self._applied, self._heard = replace(self.known, version=0, others=()), 0, False
            return True
        if self._heard and answer.version == self.known.version and not (answer.members or answer.left):
            return False
        self._heard = self._pending = True
        members = {member.generation: member for member in self.known.others}
        before = set(members)
        for generation in answer.left:
            members.pop(generation, None)
        members.update((member.generation, member) for member in answer.members)
        own = members.pop(self.known.own.generation, self.known.own)
        others = sorted(members.values(), key=lambda member: member.generation)
        self.known = replace(self.known, own=own, version=answer.version, others=tuple(others))
        log.info(
            "follower: version %d of cluster %s: jobs that joined: %s; that left: %s",
            *(answer.version, self.known.name),
            *(_jobs(set(members) - before), _jobs(before - set(members))),
        )
        return True

    # --- network and guests ----------------------------------------------------

    def _apply(self) -> None:
        """Apply what is known; if the network refuses, that is tried again, and vhpcd is not told of it."""
        try:
            self.network.follow(self.known)
        except Exception as err:
            line = error_line(err)
            if line != self._failed:
                log.error("follower: the network does not follow the cluster: %s", line)
            self._failed = line
            return
        self._failed, self._pending = "", False
        self._tell()
        self._applied = self.known.version

    def _tell(self) -> None:
        """Tell the guests; those that do not answer delay nobody, and are told again later."""
        late = self.guests.tell(self.known)
        self._tell_at = self.clock() + TELL_AGAIN_S if late else None

    # --- its end --------------------------------------------------------------

    def _leave(self) -> None:
        """The guests of this node are about to be ended: the other members need not wait for that."""
        setting, every = self.setting, self.guests.all()
        self.process.briefly(
            lambda: self.vhpcd.roster(setting.generation, setting.node, self._applied, every, 0.0), LEAVE_S
        )


def _jobs(generations: set[Generation]) -> str:
    return ", ".join(str(one.job_id) for one in sorted(generations)) or "none"
