# SPDX-License-Identifier: Apache-2.0
"""Limits of rules for clusters: clusters of accounts, number of guests, time without jobs.  Pure."""
# Decision: Clusters of an account

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vhpc_slurm.config.policy import Rule
from vhpc_slurm.options import cluster_account, parse_cluster
from vhpc_slurm.policy.rules import Subject, possible

DAY_S = 86400.0
LIMITS = {
    "guests of a cluster": ("max_cluster_guests", ""),
    "keep a cluster": ("max_cluster_kept_days", " days"),
}
"""Keys of rules, and the units of their values."""


def job_refusal(rule: Rule | None, value: str, *, exists: bool = True, guests: int = 0) -> str:
    """Why a job may not be in a cluster, as one line; empty if it may.

    Args:
        rule: the rule that applies to the job.
        value: of --vhpc-cluster; empty: the job is in no cluster.
        exists: the cluster has jobs, or is kept.
        guests: of all its jobs, with this one.
    """
    name, keeps = parse_cluster(value)
    why = _may_not(rule, name, exists=exists, keeps=keeps)
    if rule is None or why:
        return why
    most = rule.max_cluster_guests
    if most is not None and guests > most:
        why = f"it permits {most} guests in a cluster, and {name} would have {guests}"
        why += " (wait for the end of other jobs of the cluster, or ask for fewer guests)"
    elif keeps and rule.max_cluster_kept_days == 0:
        why = "it does not permit to keep clusters (submit the job without :keep)"
    return _refused(rule, why) if why else ""


def _may_not(rule: Rule | None, name: str, *, exists: bool, keeps: bool) -> str:
    if not cluster_account(name):
        return ""
    own = f"use a cluster of yours: --vhpc-cluster={name.rpartition('/')[2]}"
    if rule is None:
        return f"no policy rule permits cluster {name} ({own})"
    if rule.account_clusters == "none":
        return _refused(rule, f"it permits no clusters of accounts ({own})")
    if rule.account_clusters == "join" and keeps:
        return _refused(
            rule, "it does not permit to keep clusters of accounts (submit the job without :keep)"
        )
    if rule.account_clusters == "join" and not exists:
        why = f"it does not permit to create clusters of accounts, and there is no cluster {name}"
        return _refused(rule, f"{why} (see: vhpc cluster ls --all)")
    return ""


def longest_s(rules: Iterable[Rule | None]) -> float | None:
    """How long the most generous of some rules keeps a cluster; None: without limit."""
    times = [_kept_s(rule) for rule in rules]
    return None if None in times else max((one for one in times if one is not None), default=0.0)


def shortest_s(rules: Iterable[Rule | None]) -> float | None:
    """How long a cluster is kept if all these rules count; None: without limit."""
    return min((one for one in map(_kept_s, rules) if one is not None), default=None)


def _kept_s(rule: Rule | None) -> float | None:
    days = None if rule is None else rule.max_cluster_kept_days
    return None if days is None else days * DAY_S


def of_user(rules: Sequence[Rule], user: str, name: str) -> list[Rule | None]:
    """Rules that permit a user to keep a cluster, for some partition and QOS; empty: no rule does."""
    account = cluster_account(name)
    found = possible(rules, Subject(user, None, account or None, None))
    return [rule for rule in found if not _may_not(rule, name, exists=False, keeps=True)]


def _refused(rule: Rule, why: str) -> str:
    return f"policy rule {rule.name!r} refuses the job: {why}"
