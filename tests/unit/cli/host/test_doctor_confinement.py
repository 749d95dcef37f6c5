# SPDX-License-Identifier: Apache-2.0
"""`vhpc doctor` on a node that cannot protect helper processes from their user."""

from __future__ import annotations

from pathlib import Path

import pytest

from vhpc_slurm.cli.host.checks import Level, confinement
from vhpc_slurm.config import Config, Guests
from vhpc_slurm.node.host.cgroup import Hierarchy


@pytest.mark.parametrize(
    ("release", "level"),
    [
        ("6.12.48+deb13-amd64", Level.OK),
        ("5.14.0-570.el9.x86_64", Level.OK),
        ("5.12-rc1", Level.OK),
        ("5.10.0-30-amd64", Level.ERROR),
        ("4.18.0-553.el8.x86_64", Level.ERROR),
        ("next", Level.WARN),
    ],
)
def test_kernels_without_mount_setattr_are_too_old(release: str, level: Level) -> None:
    assert confinement.kernel(release).level is level


@pytest.mark.parametrize(
    ("text", "level"), [("96218\n", Level.OK), ("0\n", Level.ERROR), (None, Level.ERROR)]
)
def test_user_namespaces_are_needed(tmp_path: Path, text: str | None, level: Level) -> None:
    limit = tmp_path / "max_user_namespaces"
    if text is not None:
        limit.write_text(text)
    assert confinement.user_namespaces(limit).level is level


def test_control_groups_need_their_controllers(tmp_path: Path) -> None:
    unified = Hierarchy(tmp_path, frozenset())
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory hugetlb pids\n")
    assert confinement.control_groups(Config(), [unified]).level is Level.OK
    (tmp_path / "cgroup.controllers").write_text("cpu io pids\n")
    finding = confinement.control_groups(Config(), [unified])
    assert (finding.level, "cpuset, memory are missing" in finding.what) == (Level.WARN, True)
    old = [Hierarchy(tmp_path, frozenset({name})) for name in ("memory", "pids", "cpuset")]
    assert confinement.control_groups(Config(), old).level is Level.OK
    assert confinement.control_groups(Config(), []).level is Level.ERROR
    off = Config(guests=Guests(cgroups="off"))
    assert confinement.control_groups(off, []).level is Level.WARN
