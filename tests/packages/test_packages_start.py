# SPDX-License-Identifier: Apache-2.0
"""Programs of the packages with Slurm of their suite, on one host that has nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from debs import BOOKWORM, LIMIT_S, Suite, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.fixture(scope="session")
def started(suite: Suite, built: Callable[[Suite], Path]) -> Path:
    """The output of start.sh."""
    packages = built(suite)
    said = run("packaging/trial", packages, "tests/packages/start.sh", VHPC_PACKAGES_SUITE=suite.name)
    assert "still fails" not in said
    return packages / "started"


def test_vhpcd_starts_and_answers(started: Path) -> None:
    assert "listens on" in (started / "vhpcd").read_text()
    # no job, but a table
    assert (started / "ps").read_text().startswith("JOB ")
    assert (started / "hookd").read_text() == ""


def test_srun_of_the_suite_loads_the_plugin(started: Path) -> None:
    said = (started / "srun").read_text()
    assert "--vhpc-image=" in said
    assert "srun: error" not in said


def test_doctor_looks_at_slurm_and_vhpcd(started: Path, suite: Suite) -> None:
    found = {one["check"]: one for one in json.loads((started / "doctor.json").read_text())}
    assert suite.slurm in found["slurm.version"]["what"]
    assert {found[name]["level"] for name in ("munge", "slurm.version", "vhpcd")} == {"ok"}
    # Debian 12 has QEMU's old one only, which the site replaces
    assert found["node.virtiofsd"]["level"] == ("error" if suite == BOOKWORM else "ok")


@pytest.mark.promise("install.libraries")
def test_bundled_libraries_are_for_vhpc_alone(started: Path, suite: Suite) -> None:
    if suite == BOOKWORM:
        assert "No module named 'msgspec'" in (started / "system").read_text()
    else:  # that of Debian
        assert (started / "system").read_text() == ""
