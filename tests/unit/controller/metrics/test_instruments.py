# SPDX-License-Identifier: Apache-2.0
"""What vhpcd counts of the requests that it answers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.metrics.instruments import MOST_ENDS, MOST_STAGES, Instruments
from vhpc_slurm.controller.wire_types import TimelineWire
from vhpc_slurm.model import Stage


def test_a_node_cannot_make_time_series_without_end() -> None:
    registry = CollectorRegistry()
    instruments = Instruments(registry)
    for number in range(MOST_STAGES + 500):
        line = TimelineWire(generation="1.0.aaaaaaaa", node="n1", stages=(Stage(f"s{number}", 1.0, 2.0),))
        instruments.answered(wire.ReportTimeline(timeline=line), wire.Done(), 0.1)
    names = {
        one.labels["stage"]
        for family in registry.collect()
        if family.name == "vhpc_stage_seconds"
        for one in family.samples
    }
    assert len(names) == MOST_STAGES + 1
    assert "other" in names


def test_an_end_that_is_reported_again_counts_once() -> None:
    registry = CollectorRegistry()
    instruments = Instruments(registry)
    stages = (Stage("power off", 1.0, 2.0),)

    def ends(job: int, *, clean: bool) -> None:
        request = wire.Acknowledge(generation=f"{job}.0.aaaaaaaa", node="n1", clean=clean, stages=stages)
        instruments.answered(request, wire.Done(), 0.1)

    def count(result: str) -> float | None:
        return registry.get_sample_value("vhpc_teardowns_total", {"result": result})

    for clean in (False, False, True, True):
        ends(1, clean=clean)
    assert (count("unclean"), count("clean")) == (1, 1)
    for job in range(2, 2 + MOST_ENDS):
        ends(job, clean=True)
    assert count("clean") == 1 + MOST_ENDS
    ends(1 + MOST_ENDS, clean=True)
    assert count("clean") == 1 + MOST_ENDS
    ends(1, clean=True)
    assert count("clean") == 2 + MOST_ENDS, "only the last ones are kept in memory"
