# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are being made: requests of users, reports of keepers, and orders to them.

A checkpoint becomes VALID in one transaction, which also records the last report and removes older ones; a
job's end fails what is not VALID in the transaction that ends its lease (``lifecycle``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from itertools import count
from typing import TYPE_CHECKING

from vhpc_slurm.controller.leases import checkpoint_rules, rules, savable
from vhpc_slurm.controller.leases.checkpoint_quota import CheckpointQuota
from vhpc_slurm.controller.leases.checkpoint_removal import CheckpointRemoval
from vhpc_slurm.controller.leases.checkpoint_rules import COMPLETED, HOLDS
from vhpc_slurm.controller.store.checkpoints import StoredCheckpoint
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import (
    FIGURE_MAX,
    SUM_MAX,
    UNFINISHED,
    CheckpointState,
    Generation,
    KeeperOrder,
    KeeperReport,
    KeeperState,
    Lease,
    LeaseState,
    OrderKind,
    Resume,
    SavedNode,
)
from vhpc_slurm.record import Record

if TYPE_CHECKING:
    from vhpc_slurm.config import Config
    from vhpc_slurm.controller.store.port import LeaseStore

log = logging.getLogger("vhpcd")

KEY_BYTES = 32
FORGET_S = 7 * 86400.0
"""How long a checkpoint without files is listed."""
HOLD_S = 60.0
"""Nodes have so many seconds more than twice ``checkpoint.hold_timeout_s`` to stop the guests of a job."""
LINE = 1000
"""Characters of a node's reason."""
SILENT_S = 180.0
"""A keeper that saves asks every ten seconds; without it other nodes would wait until the job ends."""


class Asked(Record, frozen=True):
    """The effects of a keeper's report.

    Attributes:
        changed: the state of the checkpoint: other keepers of the job have orders now.
        ends: the checkpoint with which the caller must end this run of the job.
    """

    changed: bool = False
    ends: StoredCheckpoint | None = None


class Timed(Record, frozen=True):
    """A job with --vhpc-checkpoint.

    Attributes:
        lease: of its run.
        last: what its nodes have written for its last checkpoint.
        saved: when the last checkpoint of this run began; None: there is none.
    """

    lease: Lease
    last: tuple[SavedNode, ...]
    saved: float | None


class CheckpointLedger:
    """Makes checkpoints; for the database thread only."""

    def __init__(
        self,
        store: LeaseStore,
        removal: CheckpointRemoval,
        quota: CheckpointQuota,
        *,
        clock: Callable[[], float],
        steady: Callable[[], float],
        config: Config,
    ) -> None:
        """``clock`` is the wall clock; ``steady`` never jumps."""
        self._store = store
        self._removal = removal
        self._quota = quota
        self._clock = clock
        self._steady = steady
        self._config = config
        self._hold_s = HOLD_S + 2 * config.checkpoint.hold_timeout_s
        self._since: dict[int, float] = {}
        self._heard: dict[tuple[int, str], float] = {}

    # --- for users ----------------------------------------------------------------

    def owned(self, job_id: int, uid: int | None) -> Lease:
        """The lease of a job that runs, if it can be saved; ``uid`` None: root may do that for everybody.

        Raises:
            UserError: there is none of this user, or it cannot be saved.
        """
        record = self._store.newest(job_id)
        if record is not None and record.lease.state is LeaseState.RESERVED:
            raise UserError(f"the guests of job {job_id} do not boot yet", "", "try again when they run")
        if record is None or record.lease.state is not LeaseState.READY:
            raise UserError(f"job {job_id} does not run in guests", "", "see: vhpc ps")
        lease = record.lease
        if uid not in (None, lease.request.uid):
            raise UserError(f"job {job_id} belongs to another user", "", "see: vhpc ps")
        if why := savable.refusal(lease, self._config):
            raise UserError(f"job {job_id} cannot be saved", why, "see docs/checkpoint.md")
        return lease

    def begin(
        self, job_id: int, name: str, *, stop: bool, uid: int | None, requeue: bool = False
    ) -> StoredCheckpoint:
        """A new checkpoint of a job; one without a name is called JOBID.NUMBER.

        With ``stop`` or ``requeue`` the run of the job ends with it.

        Raises:
            UserError: as ``owned``, the job is being saved or ended already, or its policy permits no more.
        """
        stop = stop or requeue
        lease = self.owned(job_id, uid)
        self.expire()
        last = self._store.checkpoints.of(lease.generation)
        if last is not None and last.state in UNFINISHED:
            if (last.stop, last.requeue) == (stop, requeue) and name in ("", last.name):
                return last  # the client repeats a request whose answer it has not got
            raise UserError(
                f"job {job_id} is being saved already", f"its checkpoint {last.name} is {last.state}"
            )
        if last is not None and last.state is CheckpointState.VALID and last.stop:
            raise UserError(f"job {job_id} is being ended", f"its checkpoint {last.name} is complete")
        with self._store.transaction():
            made = self._store.checkpoints.add(
                lease,
                name or self._name(job_id),
                stop=stop,
                requeue=requeue,
                key=os.urandom(KEY_BYTES),
                now=self._clock(),
            )
            self._quota.reserve(made.serial, lease)
        self._since[made.serial] = self._steady()
        log.info(
            "checkpoint %d (%s) of %s begins%s",
            made.serial,
            made.name,
            made.generation,
            " (requeue)" if requeue else " (stop)" * stop,
        )
        return made

    def _name(self, job_id: int) -> str:
        """JOBID.NUMBER, where no earlier checkpoint of the job that is known has the number."""
        names = {one.name for one in self._store.checkpoints.page(0, job_id=job_id)}
        return next(name for number in count(1) if (name := f"{job_id}.{number}") not in names)

    # --- for keepers --------------------------------------------------------------

    def ask(self, generation: Generation, node: str, report: KeeperReport | None) -> Asked:
        """Take the report of a keeper; None: its guests are not stopped, and it has nothing to say.

        Raises:
            FabricError: the job has no part on that node.
        """
        lease = self._current(generation)
        if lease is None:
            return Asked()
        if node not in lease.allocation.node_names:
            raise FabricError(f"lease {generation} has no part on node {node[:80]}")
        if report is not None and not 0 <= report.serial <= SUM_MAX:
            raise FabricError(f"lease {generation} cannot take a report", "its checkpoint is out of range")
        if report is not None and report.paused_s is not None:
            with self._store.transaction():
                self._store.checkpoints.paused(report.serial, generation, report.paused_s)
        expired = generation.job_id in self.expire(silent=False)  # a thousand keepers ask at once
        one = self._store.checkpoints.of(generation)
        if one is None or one.state not in UNFINISHED:
            return Asked(changed=expired)
        self._heard[one.serial, node] = self._steady()
        about = report if report is not None and report.serial == one.serial else None
        done = self._react(one, lease, node, about)
        return Asked(changed=done.changed or expired, ends=done.ends)

    def _react(self, one: StoredCheckpoint, lease: Lease, node: str, report: KeeperReport | None) -> Asked:
        store, serial = self._store.checkpoints, one.serial
        said = None if report is None else report.state
        done = KeeperState.HELD if one.state is CheckpointState.HOLDING else KeeperState.SAVED
        known = store.reported(serial, node)
        missing = len(lease.allocation.nodes) - store.count(serial, done) - (known is not done)
        why = ""
        if report is not None and said is KeeperState.SAVED:
            why = _incomplete(lease, node, report, encrypt=self._config.checkpoint.encrypt)
        reaction = checkpoint_rules.react(
            one.state,
            known,
            KeeperState.FAILED if why else said,
            missing,
            why or (report.line[:LINE] if report is not None else ""),
        )
        if reaction == checkpoint_rules.NOTHING:
            return Asked()
        with self._store.transaction():
            if reaction.store and report is not None:
                store.report(serial, node, report.state, report.saved)
            if reaction.state is not None:
                error = reaction.error and f"{node}: {reaction.error}"
                store.move(serial, reaction.state, self._clock(), error)
            if reaction.state is CheckpointState.VALID:
                self._quota.measure(serial)
                self._removal.remove_surplus(one.job_id)
        if reaction.state is None:
            return Asked(said is KeeperState.PREPARED and self._prepared(one))
        log.info("checkpoint %d of %s: %s %s", serial, one.generation, reaction.state, reaction.error)
        return Asked(True, one if one.stop and reaction.state is CheckpointState.VALID else None)

    def order(self, generation: Generation, report: KeeperReport | None) -> KeeperOrder:
        """Return the order for the keeper that has sent this report."""
        over = self._current(generation) is None
        said = None if report is None else report.state
        if report is not None and said in HOLDS:
            one = self._store.checkpoints.get(report.serial)
            if one is None or one.generation != generation:
                return KeeperOrder(OrderKind.OVER if over else OrderKind.CONTINUE, report.serial)
        else:
            one = self._store.checkpoints.of(generation)
        if one is None:
            return KeeperOrder(checkpoint_rules.order(None, said, over=over))
        prepared = said is KeeperState.PREPARED and self._prepared(one)
        kind = checkpoint_rules.order(one.state, said, stop=one.stop, over=over, prepared=prepared)
        if kind in (OrderKind.WAIT, OrderKind.OVER):
            return KeeperOrder(kind)
        if kind is OrderKind.SAVE:
            return KeeperOrder(kind, one.serial, one.name, one.key, encrypt=self._config.checkpoint.encrypt)
        return KeeperOrder(kind, one.serial, one.name)

    def _prepared(self, one: StoredCheckpoint) -> bool:
        """Whether all nodes are prepared, so that the first one may stop its guests."""
        count = self._store.checkpoints.count
        reported = count(one.serial, KeeperState.PREPARED) + count(one.serial, KeeperState.HELD)
        return reported == len(one.origin.allocation.nodes)

    def _current(self, generation: Generation) -> Lease | None:
        """The lease of a generation; None if it is over."""
        record = self._store.newest(generation.job_id)
        if record is None or record.lease.generation != generation:
            return None
        return record.lease if record.lease.state in rules.USABLE else None

    # --- in the course of time ----------------------------------------------------

    def expire(self, *, silent: bool = True) -> frozenset[int]:
        """Give up checkpoints whose nodes stop their guests too late, or are silent while they save.

        Returns their jobs. Without ``silent`` the latter, which a list of all nodes shows, are left alone.
        """
        now, store = self._steady(), self._store.checkpoints
        active = store.active()
        # A vhpcd that was started again does not know since when; nodes then have all of the time again.
        self._since = {one.serial: self._since.get(one.serial, now) for one in active}
        self._heard = {key: heard for key, heard in self._heard.items() if key[0] in self._since}
        given_up = set[int]()
        for one in active:
            holding = one.state is CheckpointState.HOLDING
            why = self._not_stopped(one, now) if holding else self._silent(one, now) if silent else ""
            if not why:
                continue
            with self._store.transaction():
                store.move(one.serial, CheckpointState.FAILED, self._clock(), why)
            log.warning("checkpoint %d of %s: %s", one.serial, one.generation, why)
            given_up.add(one.job_id)
        return frozenset(given_up)

    def _not_stopped(self, one: StoredCheckpoint, now: float) -> str:
        """Which guests were not stopped in time; empty while there is time."""
        if now - self._since[one.serial] < self._hold_s:
            return ""
        known = self._store.checkpoints.reports(one.serial)
        names = one.origin.allocation.node_names
        nodes = [node for node in names if known.get(node) is not KeeperState.HELD]
        more = f" and on {len(nodes) - 1} other nodes" if len(nodes) > 1 else ""
        first = nodes[0] if nodes else "no node"
        return f"the guests on {first}{more} were not stopped in {self._hold_s:g} s"

    def _silent(self, one: StoredCheckpoint, now: float) -> str:
        """The node that should save and says nothing; empty if all of them do."""
        for node, state in self._store.checkpoints.reports(one.serial).items():
            heard = self._heard.setdefault((one.serial, node), now)
            if state is KeeperState.HELD and now - heard >= SILENT_S:
                return f"{node}: its keeper has not asked for orders for {SILENT_S:g} s"
        return ""

    def prune(self) -> None:
        """Forget checkpoints that have had no files for a while."""
        with self._store.transaction():
            self._store.checkpoints.prune(self._clock() - FORGET_S)

    def timed(self) -> tuple[Timed, ...]:
        """Running jobs with --vhpc-checkpoint; those that are being saved already are not among them."""
        store = self._store.checkpoints
        found = []
        for record in self._store.live():
            lease = record.lease
            if lease.state is not LeaseState.READY or not savable.is_asked(lease.request):
                continue
            newest = store.of(lease.generation)
            if newest is not None and (
                newest.state in UNFINISHED or (newest.stop and newest.state in COMPLETED)
            ):
                continue
            valid = store.valid(lease.generation.job_id)
            last = store.saved(valid[0].serial) if valid else ()
            found.append(Timed(lease, last, None if newest is None else newest.created))
        return tuple(found)

    def to_end(self) -> tuple[StoredCheckpoint, ...]:
        """Return complete checkpoints whose jobs must be ended."""
        return self._store.checkpoints.stopping()

    def kept(self, serials: Collection[int]) -> frozenset[int]:
        """Those of some checkpoints whose files are needed; the files of all others can be deleted."""
        return self._store.checkpoints.kept(serials)

    def secret(self, lease: Lease, node: str) -> Resume | None:
        """Return the node's part of the checkpoint; None if the lease continues none.

        Raises:
            FabricError: vhpcd has lost the checkpoint.
        """
        resume = lease.resume
        if resume is None:
            return None
        one = self._store.checkpoints.get(resume.serial)
        place = lease.allocation.node_names.index(node)
        origin = resume.nodes[place].node
        saved = self._store.checkpoints.saved(resume.serial, origin)
        if one is None or one.state is not CheckpointState.VALID or not saved:
            raise FabricError(f"checkpoint {resume.serial} of lease {lease.generation} is gone")
        nodes = (*resume.nodes[:place], saved[0], *resume.nodes[place + 1 :])
        return Resume(resume.serial, resume.name, resume.origin, nodes, one.key)


def _incomplete(lease: Lease, node: str, report: KeeperReport, *, encrypt: bool) -> str:
    """Why a report of SAVED does not have all guests of its node, encrypted if wanted; empty if it does."""
    saved, count = report.saved, lease.request.guests_per_node
    first = lease.allocation.node_names.index(node) * count
    if saved is None or saved.node != node:
        return "the report does not say what was saved"
    if [guest.rank for guest in saved.guests] != list(range(first, first + count)):
        return f"the report does not have the guests {first} to {first + count - 1}"
    seals = [seal for guest in saved.guests for seal in (guest.state, guest.disk) if seal is not None]
    if encrypt and not all(seal.encrypted for seal in seals):
        return "the node has not encrypted its guests (update its vhpc)"
    if not all(0 <= seal.size < FIGURE_MAX for seal in seals):
        return "the report has an impossible size of a file"
    return ""
