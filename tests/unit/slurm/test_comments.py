# SPDX-License-Identifier: Apache-2.0
"""AdminComment with the text of vhpc and that of another program."""

from __future__ import annotations

from dataclasses import replace

import pytest
from controller_lab import allocation, identity, request

from vhpc_slurm.model import Checkpoint, CheckpointState, Generation, Lease, LeaseState, Resume
from vhpc_slurm.slurm import comments

USAGE = "usage cpu_s=1.00 guests=1/1"


@pytest.mark.parametrize(
    ("present", "after"),
    [
        ("", "vhpc: new"),
        ("vhpc: image old@sha256:1", "vhpc: new"),
        (f"vhpc: image old@sha256:1; {USAGE}", "vhpc: new"),
        ('{"class": 7}', 'vhpc: new // {"class": 7}'),
        ("vhpc: image old@sha256:1 // a // b", "vhpc: new // a // b"),
        (f"vhpc: image old@sha256:1 // a; {USAGE}", "vhpc: new // a"),
        ("x" * 1011, "vhpc: new // " + "x" * 1011),
        ("x" * 1012, "vhpc: new"),
    ],
)
def test_text_of_another_program_stays_behind_ours(present: str, after: str) -> None:
    assert comments.beside("vhpc: new", present) == after


LEASE = Lease(Generation(7, 1, "0" * 8), LeaseState.READY, request(7), allocation(), identity())
IMAGE = f"vhpc: image {LEASE.image}"
ORIGIN = Generation(5, 0, "0" * 8)


def test_the_text_about_a_lease_names_its_checkpoint() -> None:
    assert comments.of_lease(LEASE) == IMAGE
    resumed = replace(LEASE, resume=Resume(3, "night", ORIGIN, ()))
    assert comments.of_lease(resumed) == f"{IMAGE}; continues checkpoint night of job 5"
    assert comments.of_lease(resumed, "more") == f"{IMAGE}; continues checkpoint night of job 5; more"
    assert comments.of_lease(replace(LEASE, image=None), "why") == "vhpc: why"


def checkpoint(state: CheckpointState, *, stop: bool = False, error: str = "") -> Checkpoint:
    return Checkpoint(
        serial=3, name="7.2", uid=2001, generation=LEASE.generation, image="x", state=state, created=1.0,
        stop=stop, node_count=1, error=error,
    )  # fmt: skip


VALID, REMOVED, FAILED, SAVING = (CheckpointState(name) for name in ("valid", "removed", "failed", "saving"))
LATE = "not saved before its end: checkpoint 7.2: "


@pytest.mark.parametrize(
    ("last", "state", "requeued", "sentence"),
    [
        (checkpoint(VALID), "COMPLETED", False, "saved as checkpoint 7.2"),
        (checkpoint(REMOVED), "TIMEOUT", False, "saved as checkpoint 7.2"),
        (checkpoint(VALID, stop=True), "CANCELLED", False, "stopped with checkpoint 7.2"),
        (checkpoint(VALID, stop=True), "PENDING", True, "requeued with checkpoint 7.2"),
        (checkpoint(FAILED, stop=True, error="n1: full"), "TIMEOUT", False, LATE + "n1: full"),
        (checkpoint(FAILED, stop=True, error="n1: full"), "PENDING", True, LATE + "n1: full"),
        (checkpoint(SAVING, stop=True), "PREEMPTED", False, LATE + "the job has ended"),
        (checkpoint(FAILED, stop=True), "COMPLETED", False, ""),
        (checkpoint(FAILED), "TIMEOUT", False, ""),
    ],
)
def test_a_run_that_has_ended_names_its_last_checkpoint(
    last: Checkpoint, state: str, requeued: bool, sentence: str
) -> None:
    before = checkpoint(VALID)
    assert comments.at_end([before, last], state, requeued=requeued) == sentence


def test_the_reason_is_that_of_an_attempt_before_the_last_one() -> None:
    first = replace(checkpoint(FAILED, stop=True, error="n1: a step runs"), name="7.1")
    last = checkpoint(FAILED, stop=True, error="the job has ended")
    said = comments.at_end([first, last], "TIMEOUT", requeued=False)
    assert said == "not saved before its end: checkpoint 7.1: n1: a step runs"
    assert comments.at_end([last], "TIMEOUT", requeued=False) == f"{LATE}the job has ended"
    assert comments.at_end([], "TIMEOUT", requeued=False) == ""


@pytest.mark.parametrize(
    ("present", "after"),
    [
        ("vhpc: image x", "vhpc: image x; new"),
        ("vhpc: image x; new", "vhpc: image x; new"),
        ("vhpc: image x // a; new", "vhpc: image x; new // a; new"),
        ("", "vhpc: new"),
        ("a", "vhpc: new // a"),
    ],
)
def test_a_sentence_is_added_once_and_before_other_text(present: str, after: str) -> None:
    assert comments.add(present, "new") == after
    assert comments.add(present, "") == present
