# SPDX-License-Identifier: Apache-2.0
"""Limits of a rule for what users and accounts keep after their jobs: checkpoints.  Pure."""

from __future__ import annotations

from typing import NamedTuple

from vhpc_slurm.config.policy import Rule

MIB = 1 << 20


class Quota(NamedTuple):
    """A limit for all checkpoints of an owner.

    Attributes:
        owner: "user" or "account".
        key: of ``Rule``: the largest number of MiB.
    """

    owner: str
    key: str

    def most(self, rule: Rule | None) -> int | None:
        """How many bytes a rule permits; None: there is no limit."""
        mib: int | None = None if rule is None else getattr(rule, self.key)
        return None if mib is None else mib * MIB


QUOTAS = (Quota("user", "max_checkpoint_user_mib"), Quota("account", "max_checkpoint_account_mib"))


def quota_refusal(rule: Rule, quota: Quota, name: str, used: int, needed: int) -> str:
    """Why a rule does not permit one more checkpoint, as one line; empty if it does.

    Args:
        rule: the rule that applies to the job.
        quota: the limit.
        name: of the user, or of the account.
        used: bytes of the checkpoints that stay.
        needed: bytes that the new one will probably have.
    """
    most = quota.most(rule)
    if most is None or used + needed <= most:
        return ""
    if not most:
        return f"policy rule {rule.name!r} permits no checkpoints"
    return (
        f"policy rule {rule.name!r} permits {most // MIB} MiB of checkpoints for each {quota.owner}, and "
        f"{name} would have {-(-(used + needed) // MIB)} MiB with this one, "
        f"which may need {-(-needed // MIB)} MiB"
    )
