# SPDX-License-Identifier: Apache-2.0
"""vhpc node drain: which jobs it saves, and what it says of those that stay."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from checkpoint_rig import nodes
from controller_lab import identity, request

from vhpc_slurm.cli import context, leases, options
from vhpc_slurm.cli.host import nodedrain
from vhpc_slurm.cli.main import main
from vhpc_slurm.config import Config
from vhpc_slurm.controller import checkpoint_client
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import (
    Checkpoint,
    CheckpointState,
    Generation,
    Lease,
    LeaseRecord,
    LeaseState,
    NetworkIdentity,
)


def lease(job: int, *names: str, state: LeaseState = LeaseState.READY) -> LeaseRecord:
    made = Lease(
        Generation(job, 0, "0123abcd"), state, request(job), nodes(*names), identity(0), NetworkIdentity()
    )
    return LeaseRecord(made, 0.0, 0.0, ())


class Vhpcd:
    """A vhpcd with jobs on n1 and n2; job 8 cannot be saved, the checkpoint of job 9 fails."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def leases(self, *, live: bool, timelines: bool) -> list[LeaseRecord]:
        assert (live, timelines) == (True, False)
        ending = lease(6, "n1", state=LeaseState.ENDING)
        return [
            lease(10, "n2"),
            lease(9, "n1", state=LeaseState.RESERVED),
            lease(7, "n1", "n2"),
            lease(8, "n1"),
            ending,
        ]

    def save(self, job_id: int, *, requeue: bool) -> Checkpoint:
        assert requeue
        self.saved.append(job_id)
        if job_id == 8:
            raise UserError("job 8 cannot be saved", "its guests have devices of the hosts")
        return Checkpoint(
            serial=job_id,
            name=f"{job_id}.1",
            uid=2001,
            generation=Generation(job_id, 0, "0123abcd"),
            image="a",
            state=CheckpointState.HOLDING,
            created=0.0,
            stop=True,
            node_count=1,
        )

    def checkpoint(self, serial: int) -> Checkpoint:
        made = self.save(serial, requeue=True)
        if serial == 9:
            return replace(made, state=CheckpointState.FAILED, error="n1: step 0 runs")
        return replace(made, state=CheckpointState.VALID)


@pytest.fixture
def drained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The nodes that Slurm is told to drain, with the reasons."""
    found: list[tuple[str, str]] = []
    port = SimpleNamespace(drain=lambda node, reason: found.append((node, reason)))
    monkeypatch.setattr(options, "config", Config)
    monkeypatch.setattr(context, "is_root", lambda: True)
    monkeypatch.setattr(nodedrain, "commands", lambda *_: port)
    monkeypatch.setattr(checkpoint_client, "POLL_S", 0.0)
    monkeypatch.setattr(leases, "client", lambda _: Vhpcd())
    return found


def test_jobs_of_the_node_are_saved_and_listed(
    drained: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["node", "drain", "n1", "--reason", "new memory"]) == 1
    assert drained == [("n1", "new memory")]
    said = capsys.readouterr()
    assert [line.split(None, 3) for line in said.out.splitlines()] == [
        ["JOB", "USER", "STATE", "CHECKPOINT OR REASON"],
        ["7", "alice", "saved", "7.1"],
        ["8", "alice", "stays", "job 8 cannot be saved: its guests have devices of the hosts"],
        ["9", "alice", "stays", "n1: step 0 runs"],
    ]
    assert "vhpc: job 7 is being saved (job 1 of 3)" in said.err


def test_json_has_what_became_of_each_job(
    drained: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["node", "drain", "n2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "node": "n2",
        "jobs": [
            {"job": 7, "user": "alice", "checkpoint": "7.1", "error": None},
            {"job": 10, "user": "alice", "checkpoint": "10.1", "error": None},
        ],
    }
    assert drained[0][1].startswith("vhpc node drain by ")


def test_users_cannot_drain(
    drained: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(context, "is_root", lambda: False)
    monkeypatch.setattr(context, "user_name", lambda _=None: "alice")
    assert main(["node", "drain", "n1"]) == 1
    assert "vhpc node drain needs root or the user slurm" in capsys.readouterr().err
    assert drained == []


def test_a_name_that_no_node_can_have_is_refused(
    drained: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["node", "drain", "n[1-4]"]) == 1
    assert "is not a valid node name" in capsys.readouterr().err
    assert drained == []
