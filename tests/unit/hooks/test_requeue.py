# SPDX-License-Identifier: Apache-2.0
"""A Prolog without a lease, with a Slurm that does not answer: requeue, or one true line for the user."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from boot_rig import boot_layout
from prolog_rig import Node, prolog_node

from vhpc_slurm import slurm
from vhpc_slurm.controller.exchange import AnswerError
from vhpc_slurm.errors import FabricError
from vhpc_slurm.hooks import epilog, requeueing
from vhpc_slurm.model import Generation
from vhpc_slurm.munge import MungeBusyError
from vhpc_slurm.node.store import journal, outbox, statefile, timeline
from vhpc_slurm.slurm import conffile
from vhpc_slurm.slurm.port import NoSuchJobError, NotRequeueableError, SlurmError
from vhpc_slurm.slurm.scontrol import Scontrol

layout = boot_layout
node = prolog_node
SILENT = SlurmError("squeue failed", "no answer within 10 s")
NO_VHPCD = FabricError("vhpcd at ctl port 7777 does not answer", "timed out")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass by sleeping only; a Prolog that began now."""
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(timeline, "process_began", timeline.now)
    return now


def silent_for(monkeypatch: pytest.MonkeyPatch, clock: list[float], seconds: float) -> list[int]:
    """Slurm does not answer for so long; a command waits for ten seconds. Returns what was requeued then."""
    until, requeued = clock[0] + seconds, list[int]()

    def requeue(_: Scontrol, job_id: int) -> None:
        if clock[0] < until:
            clock[0] += 10.0
            raise SILENT
        requeued.append(job_id)

    monkeypatch.setattr(Scontrol, "requeue", requeue)
    return requeued


def limit(monkeypatch: pytest.MonkeyPatch, folder: Path, line: str) -> None:
    (folder / "slurm.conf").write_text(f"{line}\n")
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))


@pytest.mark.promise("munge.silent", "attack.munged")
def test_a_requeue_waits_for_a_slurm_that_is_silent(
    node: Node, clock: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit(monkeypatch, tmp_path, "PrologEpilogTimeout=300")
    requeued = silent_for(monkeypatch, clock, 75.0)
    node.answers = [NO_VHPCD, NO_VHPCD]
    assert node.run() == 0
    assert (requeued, node.comments, node.drained) == ([42], [], [])
    assert node.state == {}


@pytest.mark.promise("munge.silent", "attack.munged")
@pytest.mark.parametrize(("line", "seconds"), [("PrologEpilogTimeout=120", 120), ("", 300)])
def test_a_requeue_ends_before_slurm_ends_the_prolog(
    node: Node, clock: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, seconds: int
) -> None:
    limit(monkeypatch, tmp_path, line)
    assert silent_for(monkeypatch, clock, 1e6) == []
    node.answers = [NO_VHPCD, NO_VHPCD]
    began = clock[0]
    assert node.run() == 0
    assert seconds - 60 <= clock[0] - began <= seconds - 30, "the user is told in the rest"
    tried = f"n1 tried for {clock[0] - began:.0f} s to requeue the job: squeue failed: no answer within 10 s"
    assert node.state["status"] == "failed"
    assert node.state["message"] == f"{NO_VHPCD.line()}; {tried}; submit it again"
    assert node.comments == [(42, f"vhpc: {NO_VHPCD.line()}; {tried}; submit it again")]


@pytest.mark.promise("munge.silent")
def test_a_job_without_requeue_gets_its_lease_in_the_end(
    node: Node, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a job without guests waits until munged of its node answers."""
    silent = MungeBusyError("cannot create a munge credential", "Timed-out; tried for 70 s")
    node.answers, node.may_requeue = [silent, silent], False
    assert node.run() == 0
    assert (node.state["status"], node.comments) == ("ready", [])


def test_a_lease_that_vhpcd_denies_is_not_asked_for_again(node: Node, clock: list[float]) -> None:
    node.answers, node.may_requeue = [AnswerError("lease 42.0.0123abcd has no part on node n1")] * 2, False
    assert node.run() == 0
    assert node.state["message"] == (
        "lease 42.0.0123abcd has no part on node n1; the job may not be requeued: submit it again"
    )


def test_the_epilog_releases_the_state_file_of_tasks(
    node: Node, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.answers = [NO_VHPCD] * 4
    monkeypatch.setattr(Scontrol, "requeue", lambda *_: (_ for _ in ()).throw(NotRequeueableError("no")))
    assert node.run() == 0
    assert node.state["generation"] == "42.0.00000000"
    assert node.state["message"].endswith("; the job may not be requeued: submit it again")
    assert list(journal.generations(node.layout.journals)) == [Generation.without_lease(42, 0)]
    assert epilog.run(node.layout.config) == 0
    assert not node.layout.job(42).exists()
    assert list(journal.generations(node.layout.journals)) == []
    assert (node.acknowledged, outbox.pending(node.layout.outbox)) == ([], [])


def test_an_ended_job_needs_no_requeue(
    node: Node, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.answers = [NO_VHPCD] * 2
    monkeypatch.setattr(Scontrol, "requeue", lambda *_: (_ for _ in ()).throw(NoSuchJobError("no job")))
    assert node.run() == 0
    assert (node.state, node.comments) == ({}, [])


def test_a_requeue_without_an_answer_counts_as_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The output of scontrol 24.11 for a job that is requeued already."""
    for name, script in (
        ("squeue", 'echo "42 42 N/A N/A N/A"'),
        ("scontrol", 'echo "Job is pending execution for job 42" >&2; exit 1'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    Scontrol(str(tmp_path)).requeue(42)


# --- slurm.conf ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("PrologEpilogTimeout=300", 300),
        ("prologepilogtimeout = 300 # seconds", 300),
        ("#PrologEpilogTimeout=300", None),
        ("PrologEpilogTimeout=65534", None),
        ("PrologEpilogTimeout=300\nPrologTimeout=400", 400),
        ("Include more.conf", 77),
        ("Include absent.conf", None),
        ("Include slurm.conf", None),
        ("ClusterName=c", None),
    ],
)
def test_slurm_conf_tells_how_long_a_prolog_may_take(tmp_path: Path, text: str, seconds: int | None) -> None:
    (tmp_path / "slurm.conf").write_text(f"ClusterName=x\n{text}\n")
    (tmp_path / "more.conf").write_text("PrologTimeout=77\n")
    assert conffile.prolog_timeout_s(tmp_path / "slurm.conf") == seconds


def test_without_slurm_conf_no_limit_applies(tmp_path: Path) -> None:
    assert conffile.prolog_timeout_s(tmp_path / "absent") is None
    assert slurm.HOOK_TIMEOUT_S < requeueing.REST_S < requeueing.UNLIMITED_S
    assert statefile.read_state(tmp_path / "state") == {}
