# SPDX-License-Identifier: Apache-2.0
"""Results of audits about isolation on the fabric, and their consequences for jobs.

A fabric that audits show to be open counts as unsafe after one deadline. A fabric
with a part that cannot be read, and could therefore be open, counts as unsafe
after another. A port that lacks its key harms only its own job: that job ends
when the key cannot be restored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.backend import FabricFinding
from vhpc_slurm.model import Generation

log = logging.getLogger("vhpcd")

_Since = tuple[float, float]
"""A moment: seconds of the monotonic clock, and seconds since the epoch."""


@dataclass(frozen=True)
class IsolationState:
    """Whether the fabric keeps jobs apart.

    Attributes:
        safe: False when the fabric has been open, or could not be read, for longer than the site
            allows: guests with keys must end.
        open_since: when the fabric was first seen open, or a part of it could first not be read, in
            seconds since the epoch; None while all of it is seen to be closed.
        what: the first finding of the last audit, or why the audit failed; empty when nothing is wrong.
        audited: when an audit last found nothing wrong, in seconds since the epoch; None: not yet.
        lost: generations whose ports have lacked their key for longer than the site allows, each with
            what the audit found: their guests must end.
    """

    safe: bool = True
    open_since: float | None = None
    what: str = ""
    audited: float | None = None
    lost: tuple[tuple[Generation, str], ...] = ()


class IsolationWatch:
    """Collects what audits find. One thread writes it; others read its state at any time."""

    def __init__(
        self, open_deadline_s: float, unread_deadline_s: float, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._open_deadline_s = open_deadline_s
        self._unread_deadline_s = unread_deadline_s
        self._steady = steady
        self._open: _Since | None = None
        self._unread: _Since | None = None
        self._lost: dict[Generation, tuple[float, str]] = {}
        self._state = IsolationState()

    def saw(
        self,
        found: tuple[FabricFinding, ...],
        trouble: FabricError | None = None,
        holders: Mapping[int, Generation] | None = None,
    ) -> None:
        """Record what an audit found.

        Args:
            found: its findings.
            trouble: why the fabric could not be changed to what it should be.
            holders: the generation that each port belongs to, by port GUID.
        """
        opening = [one for one in found if one.open]
        unread = [one for one in found if one.unread]
        blind = any(one.blind for one in found)
        if opening:
            self._open = self._open or self._now()
        elif self._open is not None and not blind:
            log.warning("the fabric is safe again after %.0f s", self._steady() - self._open[0])
            self._open = None
        self._unread = (self._unread or self._now()) if unread else None
        self._note_lost(found, holders or {}, blind=blind)
        since = [one[1] for one in (self._open, self._unread) if one is not None]
        first = next(iter((*opening, *unread, *found)), None)
        what = first.what if first else trouble.line() if trouble else ""
        audited = self._state.audited if found or trouble else time.time()
        self._state = IsolationState(open_since=min(since, default=None), what=what, audited=audited)

    def _note_lost(
        self, found: tuple[FabricFinding, ...], holders: Mapping[int, Generation], *, blind: bool
    ) -> None:
        lost = {holders[one.port_guid]: one.what for one in found if one.lost and one.port_guid in holders}
        for generation in lost.keys() - self._lost.keys():
            log.error("%s has lost its key: %s", generation, lost[generation])
        kept = self._lost if blind else {}
        self._lost = kept | {
            generation: (self._lost.get(generation, (self._steady(), ""))[0], what)
            for generation, what in lost.items()
        }

    def state(self) -> IsolationState:
        """Whether the fabric keeps jobs apart as of the last audit, and which jobs have lost their keys."""
        safe = not (
            self._over(self._open, self._open_deadline_s) or self._over(self._unread, self._unread_deadline_s)
        )
        lost = tuple(
            (generation, what)
            for generation, (since, what) in self._lost.items()
            if self._steady() - since >= self._open_deadline_s
        )
        return replace(self._state, safe=safe, lost=lost)

    def must_be_safe(self) -> None:
        """FabricError while the fabric is not safe: no job gets a key then."""
        state = self.state()
        if not state.safe:
            raise FabricError(
                "the fabric does not keep jobs apart",
                state.what,
                "vhpcd starts no job with a key until it does; see: vhpc fabric audit",
            )

    def _now(self) -> _Since:
        return self._steady(), time.time()

    def _over(self, since: _Since | None, deadline_s: float) -> bool:
        return since is not None and self._steady() - since[0] >= deadline_s
