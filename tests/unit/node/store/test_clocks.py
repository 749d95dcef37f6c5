# SPDX-License-Identifier: Apache-2.0
"""Clocks that are set, and summer time: neither changes how long something took, or when it is over."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from node_rig import node_layout

from vhpc_slurm.model import Generation
from vhpc_slurm.node.store import joblock, timeline
from vhpc_slurm.node.store.layout import Layout

layout = node_layout
SOURCES = Path(__file__).parents[4] / "python"
GENERATION = Generation(42, 0, "0123abcd")
LOCAL = re.compile(r"\b(?:localtime|mktime|strptime|fromtimestamp|utcnow|datetime\.now|ctime)\(")


@pytest.mark.promise("clock.hour-off")
def test_only_reports_for_people_have_local_time() -> None:
    """Summer time begins and ends for these only; Slurm's commands are asked for seconds of the epoch."""
    found = {path.name for path in SOURCES.rglob("*.py") if LOCAL.search(path.read_text())}
    assert found == {"output.py"}
    assert '"SLURM_TIME_FORMAT": "%s"' in (SOURCES / "vhpc_slurm/slurm/scontrol.py").read_text()


@pytest.mark.promise("clock.hour-off")
@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_clock_that_is_set_in_a_stage_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    real = time.time
    recorder = timeline.Recorder(tmp_path / "line", GENERATION, "n1")
    with recorder.stage("start g0"):
        monkeypatch.setattr(time, "time", lambda: real() + step_s)
    recorder.note("setup g0", timeline.now())
    line = recorder.timeline()
    assert line.ready_s is not None
    assert 0 <= line.ready_s < 600
    assert all(0 <= stage.ended - stage.began < 600 for stage in line.stages)


def test_a_new_process_tells_the_time_of_the_clock() -> None:
    """Its stages are comparable with what others have written, such as Slurm."""
    code = "from vhpc_slurm.node.store import timeline; print(timeline.now())"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env={"PYTHONPATH": str(SOURCES)}
    )
    assert abs(float(said.stdout) - time.time()) < 600


@pytest.mark.promise("clock.hour-off")
def test_a_clock_an_hour_ahead_sweeps_no_tombstone(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Prolog that comes late still finds that its Epilog has run."""
    joblock.write_tombstone(layout, GENERATION)
    real = time.time
    for step_s in (3600, -3600):
        monkeypatch.setattr(time, "time", lambda step_s=step_s: real() + step_s)
        joblock.sweep(layout, older_than_s=86400.0)
        assert joblock.has_tombstone(layout, GENERATION)
