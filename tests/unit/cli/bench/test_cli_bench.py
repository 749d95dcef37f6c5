# SPDX-License-Identifier: Apache-2.0
"""vhpc bench as its users meet it, before any job: mistakes, and what a host without Slurm says."""

from __future__ import annotations

from pathlib import Path

import pytest
from vhpc_command import Vhpc

from vhpc_slurm.bench.wish import SIZES

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["node", "--image", "tinny"], 1, "image tinny:latest is unknown"),
        (["node", "--image", "tiny:1", "--tests", "pingpong"], 1, "vhpc bench job --tests pingpong"),
        (["node", "--image", "tiny:1", "--size", "lj-side=1"], 1, "not a number from 4 to 2000"),
        (["node", "--image", "tiny:1", "--svg", "/nowhere/x.svg"], 1, "cannot write /nowhere/x.svg"),
        (["node", "--image", "tiny:1", "--svg", "-", "--json"], 2, "cannot both write"),
        (["node", "--rounds", "0"], 2, "--rounds"),
        (["job", "-N", "1"], 2, "--nodes"),
        (["job", "--image", "tiny:1"], 1, "needs --vhpc-network=job, which this site does not allow"),
    ],
)
def test_mistakes_are_one_line(vhpc: Vhpc, argv: list[str], code: int, says: str) -> None:
    assert vhpc("bench", *argv, code=code) == ""
    assert says in vhpc.error


def test_missing_programs_of_vhpc_are_named(vhpc: Vhpc, tmp_path: Path) -> None:
    vhpc("bench", "node", "--image", "tiny:1", "--dir", str(tmp_path), code=1)
    assert "cannot copy vhpc-measure" in vhpc.error
    assert not list(tmp_path.glob("vhpc-bench-*"))


def test_the_manual_has_the_defaults_of_sizes() -> None:
    manual = (ROOT / "docs/man/vhpc.1").read_text().replace("\\-", "-")
    assert [name for name, (default, *_) in SIZES.items() if f"{name}={default}" not in manual] == []
    page = (ROOT / "docs/benchmark.md").read_text()
    assert [name for name in ("triad-mib", "files-mib") if f"`{name}`" not in page] == []
