# SPDX-License-Identifier: Apache-2.0
"""The runs of a job and their checkpoints in `vhpc report` and `vhpc timeline`."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from controller_lab import allocation, identity, request

from html_page import Page
from vhpc_slurm.cli.jobs import report, reportdata, reporthtml, runs
from vhpc_slurm.model import (
    Checkpoint,
    CheckpointState,
    Generation,
    Lease,
    LeaseRecord,
    LeaseState,
    Resume,
    SavedGuest,
    SavedNode,
    Seal,
    Stage,
    Timeline,
)

MIB = 1 << 20
FIRST, SECOND = Generation(7, 0, "0123abcd"), Generation(7, 1, "4567cdef")
HOSTILE = "<b>\x1b[2J\u202e"


def run(generation: Generation, *, resume: Resume | None = None, ready: bool = True) -> LeaseRecord:
    """A run on n1 whose guest was ready after 2.5 s."""
    lease = Lease(generation, LeaseState.RELEASED, request(7), allocation("n1"), identity(), resume=resume)
    stages = (Stage("start g0", 100.0, 101.0), Stage("setup g0", 101.0, 102.5))
    lines = (Timeline(generation, "n1", stages if ready else stages[:1]),)
    return LeaseRecord(lease, 1000.0 + generation.restart, 2000.0, ("n1",), lines, ("n1",))


def made(serial: int, generation: Generation = FIRST, **more: object) -> Checkpoint:
    guests = tuple(
        SavedGuest(rank, "n1", 2, 600, Seal(40 * MIB, b""), Seal(10 * MIB, b"")) for rank in (0, 1)
    )
    nodes = (SavedNode("n1", 1, "emulated", 2.0, guests[:1]), SavedNode("n2", 1, "emulated", 4.0, guests[1:]))
    one = Checkpoint(
        serial=serial, name=f"7.{serial}", uid=2001, generation=generation, image="x", nodes=nodes,
        state=CheckpointState.VALID, created=1_700_000_000.0, stop=False, node_count=2, paused_s=4.75,
    )  # fmt: skip
    return msgspec.structs.replace(one, **more)


FAILED = made(2, state=CheckpointState.FAILED, nodes=(), error=f"n2: {HOSTILE}", paused_s=None)
LAST = made(3, stop=True, requeue=True, paused_s=None)
OWN = Resume(3, "7.3", FIRST, ())
EVERY = (made(1, state=CheckpointState.REMOVED), FAILED, LAST, made(4, SECOND, state=CheckpointState.SAVING))


def found() -> reportdata.JobReport:
    records = [run(SECOND, resume=OWN), run(FIRST)]
    return reportdata.make(records[0], [], every=runs.make(records, EVERY, {}))


def test_each_run_has_its_checkpoints_and_where_it_began() -> None:
    document = json.loads(msgspec.json.encode(reportdata.document(found())))
    first, second = document["runs"]
    assert (first["restart"], first["ready_s"], first["continued"], first["nodes"]) == (0, 2.5, None, ["n1"])
    assert second["continued"] == {"checkpoint": "7.3", "serial": 3, "job": 7, "generation": str(FIRST)}
    assert (document["restart"], document["generation"]) == (1, second["generation"])
    assert first["checkpoints"][0] == {
        "name": "7.1", "serial": 1, "began": 1_700_000_000.0, "state": "removed", "end": "continued",
        "error": None, "pause_s": 4.75, "bytes": 100 * MIB, "write_s": 4.0, "mib_s": 25.0,
    }  # fmt: skip
    ends = [(one["end"], one["pause_s"], one["mib_s"]) for one in first["checkpoints"][1:]]
    assert ends == [("failed", None, None), ("requeued", None, 25.0)]
    assert [(one["end"], one["state"]) for one in second["checkpoints"]] == [(None, "saving")]


def test_text_and_page_have_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    report._show(found())
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert any(line.endswith("released n1 2.500 continues checkpoint 7.3 of run 0") for line in lines)
    assert any(line.endswith("4.750 100.0 MiB 25.0 continued, removed") for line in lines)
    assert any(line.endswith("- 100.0 MiB 25.0 requeued") for line in lines)
    assert any(line.endswith("- - - failed: n2: <b>?[2J?") for line in lines)
    text = reporthtml.render(found())
    words = "\n".join(Page(text).texts)
    for cell in ("Runs", "Checkpoints", "continues checkpoint 7.3 of run 0", "failed: n2: <b>?[2J?"):
        assert cell in words
    assert "<b>" not in text


def test_a_job_with_one_run_shows_no_table_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    records = [run(FIRST)]
    report._show(reportdata.make(records[0], [], every=runs.make(records, (), {})))
    assert "RUN" not in capsys.readouterr().out
    other = replace(OWN, name="before", origin=Generation(5, 0, "0" * 8))
    (table,) = runs.tables(runs.make([run(FIRST, resume=other)], (), {}))
    assert table.rows[0][-1] == "continues checkpoint before of job 5"


def test_a_run_whose_guests_were_not_ready_has_no_time() -> None:
    (one,) = runs.document(runs.make([run(FIRST, ready=False)], (), {}))
    assert one["ready_s"] is None
