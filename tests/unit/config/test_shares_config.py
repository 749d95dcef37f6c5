# SPDX-License-Identifier: Apache-2.0
"""The table [shares]: in which folders locks of programs hold on all hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from node_rig import account
from refused_config import expect_refused

from vhpc_slurm.config.shares import LockPolicy, Shares
from vhpc_slurm.node.guest import shares


@pytest.mark.parametrize(
    ("path", "policy"),
    [
        ("/home/alice", "cluster"),
        ("/scratch", "guest"),
        ("/scratch/alice", "guest"),
        ("/scratch/fast", "refuse"),  # the innermost of the listed folders
        ("/scratch/fast/run7", "refuse"),
        ("/scratch-old", "cluster"),  # another folder, which begins with the same letters
        ("/data/raw", "refuse"),
        ("/", "cluster"),
    ],
)
def test_a_listed_folder_decides_where_locks_below_it_hold(path: str, policy: LockPolicy) -> None:
    config = Shares(locks_guest=("/scratch/",), locks_refuse=("/scratch/fast", "/data"))
    assert config.locks_of(path) == policy


@pytest.mark.parametrize("policy", ["guest", "refuse"])
def test_all_other_folders_have_the_policy_of_the_site(policy: LockPolicy) -> None:
    config = Shares(locks=policy, locks_guest=("/a",), locks_refuse=("/b",))
    assert [config.locks_of(path) for path in ("/a/x", "/b/x", "/home")] == ["guest", "refuse", policy]


def test_each_share_has_the_lock_policy_of_its_folder() -> None:
    config = Shares(site=("/scratch/x/..", "/sw"), locks_guest=("/scratch", "/home"), locks_refuse=("/sw",))
    found, _ = shares.wanted(config, account(), "/data/run7")
    assert {share.path: share.locks for share in found} == {
        "/scratch": "guest",
        "/sw": "refuse",
        "/home/alice": "guest",  # below a folder of the list
        "/data/run7": "cluster",
    }


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ('locks_guest = ["/s/"]\nlocks_refuse = ["/s"]', "/s is in locks_guest and in locks_refuse"),
        ('locks = "host"', "locks"),
    ],
)
def test_lock_policies_that_contradict_each_other_are_refused(tmp_path: Path, lines: str, why: str) -> None:
    expect_refused(tmp_path, f"[shares]\n{lines}\n", why)
