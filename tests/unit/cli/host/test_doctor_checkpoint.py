# SPDX-License-Identifier: Apache-2.0
"""vhpc doctor: the folder of checkpoints, and Slurm's settings for jobs that are saved by themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from stepd import needs_root

from vhpc_slurm.cli.host.checks import CheckResult, Level, checkpoint
from vhpc_slurm.config import Config
from vhpc_slurm.config.checkpoint import Checkpoint
from vhpc_slurm.slurm.port import NodeResources, SlurmPartition
from vhpc_slurm.slurm.settings import SlurmSettings

SETTINGS = "JobRequeue              = {requeue}\nJobFileAppend           = {append}\n"
HUGE = 1 << 40


def results(requeue: int, append: int, *partitions: SlurmPartition) -> dict[str, CheckResult]:
    settings = SlurmSettings.parse(SETTINGS.format(requeue=requeue, append=append))
    config = Config(checkpoint=Checkpoint(folder="/ck", hold_timeout_s=60))
    found = list(checkpoint.check(config, settings, partitions))
    assert len({one.check for one in found}) == len(found)
    return {one.check: one for one in found}


def test_nothing_is_said_where_jobs_cannot_be_saved() -> None:
    assert list(checkpoint.check(Config(), SlurmSettings.parse(""), ())) == []
    assert list(checkpoint.on_node(Config(), NodeResources("n1", 1))) == []


@pytest.mark.parametrize(
    ("requeue", "append", "warned"),
    [
        (1, 1, set()),
        (0, 1, {"checkpoint.JobRequeue"}),
        (1, 0, {"checkpoint.JobFileAppend"}),
        (0, 0, {"checkpoint.JobRequeue", "checkpoint.JobFileAppend"}),
    ],
)
def test_settings_of_slurm(requeue: int, append: int, warned: set[str]) -> None:
    found = results(requeue, append)
    assert {name for name, one in found.items() if one.level is Level.WARN} == warned


@pytest.mark.parametrize(
    ("mode", "grace_s", "warned"),
    [
        ("REQUEUE", 0, True),
        ("REQUEUE", 74, True),
        ("REQUEUE", 75, False),
        ("OFF", 0, False),
        ("CANCEL", 0, False),
    ],
)
def test_a_grace_time_is_long_enough(mode: str, grace_s: int, warned: bool) -> None:
    found = results(1, 1, SlurmPartition("spare", mode, grace_s))
    assert ("checkpoint.GraceTime" in found) is warned
    if warned:
        assert f"partition spare has GraceTime={grace_s}" in found["checkpoint.GraceTime"].what
        assert found["checkpoint.GraceTime"].hint.startswith("GraceTime=75 or more")


@pytest.mark.parametrize(
    ("mode", "memory_mib", "level", "text"),
    [
        (0o700, 1, Level.OK, "belongs to root"),
        (0o755, 1, Level.ERROR, "0700"),
        (0o700, HUGE, Level.WARN, "less than the memory of this node"),
        (None, 1, Level.ERROR, "install -d -m 0700"),
    ],
)
def test_the_folder_of_a_node(
    tmp_path: Path, mode: int | None, memory_mib: int, level: Level, text: str
) -> None:
    path = tmp_path / "ck"
    if mode is not None:
        path.mkdir()
        path.chmod(mode)
    config = Config(checkpoint=Checkpoint(folder=str(path)))
    (found,) = checkpoint.on_node(config, NodeResources("n1", memory_mib))
    assert found.level is level
    assert text in f"{found.what} {found.hint}"


@needs_root
def test_encryption_needs_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    config = Config(checkpoint=Checkpoint(folder=str(tmp_path), encrypt=True))

    def found() -> CheckResult:
        *_, last = checkpoint.on_node(config, NodeResources("n1", 1))
        return last

    assert found().level is Level.OK
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    assert (found().level, found().hint) == (Level.ERROR, "apt install python3-cryptography")
