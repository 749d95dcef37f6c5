# SPDX-License-Identifier: Apache-2.0
"""Whether the policy leaves room for one more checkpoint of a user and of an account.

The bytes that a checkpoint will need are stored with it in one transaction, so two that begin at once do not
use the same room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vhpc_slurm.config.policy import Rule
from vhpc_slurm.controller.leases.checkpoint_removal import CheckpointRemoval
from vhpc_slurm.controller.store.checkpoint_sizes import Sized
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import UNFINISHED, CheckpointTotal, JobRequest, Lease, Viewer, saved_bytes
from vhpc_slurm.policy import QUOTAS, Quota, Subject, applying, quota_refusal

if TYPE_CHECKING:
    from vhpc_slurm.controller.store.port import LeaseStore

MIB = 1 << 20


class CheckpointQuota:
    """For the database thread only."""

    def __init__(self, store: LeaseStore, removal: CheckpointRemoval, rules: Sequence[Rule]) -> None:
        """``rules`` are those of the policy."""
        self._store = store
        self._removal = removal
        self._rules = rules

    def reserve(self, serial: int, lease: Lease) -> None:
        """Reserve room for a new checkpoint of a job, in the transaction of the caller that has added it.

        Raises:
            UserError: the policy does not permit it.
        """
        needed = self._expected(lease)
        rule = applying(self._rules, Subject.of(lease.request))
        if rule is not None:
            others = [one for one in self._store.checkpoints.sizes.all() if one.serial != serial]
            replaced = {one.serial for one in self._removal.surplus(lease.generation.job_id)}
            for quota in QUOTAS:
                self._check(rule, quota, lease, others, replaced, needed)
        self._store.checkpoints.sizes.put(serial, needed)

    def _check(
        self,
        rule: Rule,
        quota: Quota,
        lease: Lease,
        others: Iterable[Sized],
        replaced: set[int],
        needed: int,
    ) -> None:
        owner = _owner(quota, lease.request)
        if owner == "":
            return
        own = [one for one in others if owner == (one.uid if quota.owner == "user" else one.account)]
        used = self._counted(own) - sum(one.bytes for one in own if one.serial in replaced)
        name = lease.request.user if quota.owner == "user" else f"account {owner}"
        if why := quota_refusal(rule, quota, name, used, needed):
            raise UserError(
                f"job {lease.generation.job_id} cannot be saved",
                why,
                "delete some with vhpc checkpoint rm, see: vhpc checkpoint ls",
            )

    def measure(self, serial: int) -> None:
        """Store the real size of a checkpoint that becomes VALID, in a transaction of the caller's."""
        store = self._store.checkpoints
        store.sizes.put(serial, saved_bytes(store.saved(serial)))

    def totals(self, viewer: Viewer | None) -> tuple[CheckpointTotal, ...]:
        """The totals of users and accounts that ``viewer`` may see; None: of all."""
        rows = self._store.checkpoints.sizes.all()
        if viewer is None or viewer.everything:
            uids = {one.uid for one in rows}
            accounts = {one.account for one in rows}
        else:
            uids = {one.uid for one in rows} & {viewer.uid}
            accounts = {one.account for one in rows if one.uid in uids or one.account in viewer.accounts}
        of_users = [[one for one in rows if one.uid == uid] for uid in sorted(uids)]
        of_accounts = [[one for one in rows if one.account == name] for name in sorted(accounts - {""})]
        return tuple(
            self._total(quota, own)
            for quota, owners in zip(QUOTAS, (of_users, of_accounts), strict=True)
            for own in owners
        )

    def _total(self, quota: Quota, own: Sequence[Sized]) -> CheckpointTotal:
        """The total of one owner; the limit is that of the newest checkpoint's job."""
        newest = self._store.checkpoints.get(own[-1].serial)
        assert newest is not None
        request = newest.origin.request
        rule = applying(self._rules, Subject.of(request))
        most = quota.most(rule)
        name = request.user if quota.owner == "user" else own[-1].account
        return CheckpointTotal(
            quota.owner, name, self._counted(own), most, "" if rule is None or most is None else rule.name
        )

    def _counted(self, own: Sequence[Sized]) -> int:
        """Bytes of valid ones, and of those that are being made what they need more than they replace."""
        by_serial = {one.serial: one.bytes for one in own}
        total = sum(by_serial.values())
        for one in own:
            if one.state in UNFINISHED:
                replaced = sum(by_serial.get(old.serial, 0) for old in self._removal.surplus(one.job_id))
                total -= min(one.bytes, replaced)
        return total

    def _expected(self, lease: Lease) -> int:
        """How many bytes a new checkpoint of a job will probably have."""
        store = self._store.checkpoints
        last = [one.serial for one in store.valid(lease.generation.job_id)[:1]]
        if not last and lease.resume is not None:
            last = [lease.resume.serial]
        if last and (saved := store.saved(last[0])):
            return saved_bytes(saved)
        return sum(part.memory_mib for part in lease.allocation.nodes) * MIB


def _owner(quota: Quota, request: JobRequest) -> int | str:
    return request.uid if quota.owner == "user" else request.account
