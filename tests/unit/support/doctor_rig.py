# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of vhpc doctor: settings of real releases, and results by name."""

from __future__ import annotations

from pathlib import Path

from vhpc_slurm.cli.host.checks import CheckResult
from vhpc_slurm.slurm.settings import SlurmSettings

DATA = Path(__file__).parents[2] / "data" / "slurm-config"


def settings(name: str) -> SlurmSettings:
    return SlurmSettings.parse((DATA / f"{name}.txt").read_text())


def levels(found: list[CheckResult]) -> dict[str, str]:
    return {finding.check.removeprefix("slurm."): finding.level.value for finding in found}


def one(found: list[CheckResult], check: str) -> CheckResult:
    (finding,) = [finding for finding in found if finding.check == check]
    return finding


def executable(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path
