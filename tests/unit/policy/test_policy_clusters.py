# SPDX-License-Identifier: Apache-2.0
"""Rules about clusters: of accounts, of how many guests, and how long they are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from refused_config import expect_refused

from vhpc_slurm.config.policy import Rule
from vhpc_slurm.policy import clusters

JOIN = Rule(name="students", accounts=("course",), account_clusters="join")
CREATE = Rule(name="staff", accounts=("physics",), account_clusters="create")
SMALL = Rule(name="small", max_cluster_guests=4, max_cluster_kept_days=0)
WEEK = Rule(name="week", partitions=("main",), max_cluster_kept_days=7)


@pytest.mark.parametrize(
    ("rule", "value", "exists", "guests", "why"),
    [
        (None, "dask", False, 99, ""),
        (None, "dask:keep", True, 99, ""),
        (None, "physics/dask", True, 1, "no policy rule permits cluster physics/dask"),
        (
            SMALL,
            "physics/dask",
            True,
            1,
            "policy rule 'small' refuses the job: it permits no clusters of accounts",
        ),
        (JOIN, "course/dask", True, 1, ""),
        (JOIN, "course/dask", False, 1, "it does not permit to create clusters of accounts, and there is no"),
        (JOIN, "course/dask:keep", True, 1, "it does not permit to keep clusters of accounts (submit the"),
        (CREATE, "physics/dask:keep", False, 1, ""),
        (SMALL, "dask", True, 4, ""),
        (
            SMALL,
            "dask",
            True,
            5,
            "rule 'small' refuses the job: it permits 4 guests in a cluster, and dask would have 5",
        ),
        (SMALL, "dask:keep", False, 1, "it does not permit to keep clusters (submit the job without :keep)"),
        (WEEK, "dask:keep", False, 1, ""),
    ],
)
def test_a_rule_permits_clusters(
    rule: Rule | None, value: str, guests: int, why: str, *, exists: bool
) -> None:
    found = clusters.job_refusal(rule, value, exists=exists, guests=guests)
    assert why in found
    assert bool(found) is bool(why)


def test_users_keep_by_any_rule_that_may_apply() -> None:
    rules = (CREATE, JOIN, WEEK, SMALL)
    assert clusters.of_user(rules, "alice", "physics/dask") == [CREATE]
    assert clusters.of_user(rules, "alice", "course/dask") == []
    assert clusters.of_user(rules, "alice", "other/dask") == []
    assert clusters.of_user((), "alice", "physics/dask") == []
    assert clusters.of_user((), "alice", "dask") == [None]
    assert clusters.of_user(rules[2:], "alice", "dask") == [WEEK, SMALL]
    assert clusters.of_user((WEEK,), "alice", "dask") == [WEEK, None]


def test_the_most_generous_rule_gives_the_time() -> None:
    assert clusters.longest_s([SMALL]) == 0
    assert clusters.longest_s([SMALL, WEEK]) == 7 * 86400
    assert clusters.longest_s([SMALL, WEEK, CREATE]) is None
    assert clusters.longest_s([None, WEEK]) is None
    assert clusters.shortest_s([None, WEEK, CREATE]) == 7 * 86400
    assert clusters.shortest_s([None, CREATE]) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('account_clusters = "make"', "account_clusters"),
        ("max_cluster_guests = 0", "max_cluster_guests"),
        ("max_cluster_kept_days = -1", "max_cluster_kept_days"),
    ],
)
def test_wrong_keys_are_refused(tmp_path: Path, line: str, said: str) -> None:
    expect_refused(tmp_path, f'[[policy]]\nname = "a"\n{line}', said)
