# SPDX-License-Identifier: Apache-2.0
"""vhpc checkpoint: what it asks vhpcd for, and what it prints while and after a job is saved."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from vhpc_slurm.cli import leases, options
from vhpc_slurm.cli.main import main
from vhpc_slurm.config import Config
from vhpc_slurm.controller import checkpoint_client
from vhpc_slurm.model import (
    Checkpoint,
    CheckpointState,
    CheckpointTotal,
    Generation,
    InUse,
    Removed,
    SavedGuest,
    SavedNode,
    Seal,
)

MIB = 1 << 20
HOLDING = Checkpoint(
    serial=4,
    name="1000.2",
    uid=os.geteuid(),
    generation=Generation(1000, 0, "0123abcd"),
    image="debian-hpc@sha256:12",
    state=CheckpointState.HOLDING,
    created=1_700_000_000.0,
    stop=False,
    node_count=2,
    held=1,
)


def saved(node: str, rank: int, seconds: float) -> SavedNode:
    guest = SavedGuest(rank, node, 2, 600, Seal(70 * MIB, b"r"), Seal(5 * MIB, b"s"))
    return SavedNode(node, 10_000_007, "emulated", seconds, (guest,))


ONE, TWO = saved("n1", 0, 1.25), saved("n2", 1, 2.5)
SAVING = replace(HOLDING, state=CheckpointState.SAVING, held=2, nodes=(ONE,))
VALID = replace(SAVING, state=CheckpointState.VALID, nodes=(ONE, TWO))


class Vhpcd:
    """A vhpcd that gives these answers about checkpoint 4 in turn."""

    def __init__(self, *states: Checkpoint, known: tuple[Checkpoint, ...] = ()) -> None:
        self.states, self.known = list(states), known
        self.asked: list[object] = []
        self.removed = Removed()
        self.totals: tuple[CheckpointTotal, ...] = ()

    def save(self, job_id: int, name: str | None, *, stop: bool, requeue: bool) -> Checkpoint:
        self.asked.append((job_id, name, "requeue" if requeue else "stop" if stop else ""))
        return self.states.pop(0)

    def checkpoint(self, serial: int) -> Checkpoint:
        assert serial == 4
        return self.states.pop(0)

    def checkpoints(self, job_id: int | None = None) -> tuple[Checkpoint, ...]:
        return tuple(one for one in self.known if job_id in (None, one.generation.job_id))

    def checkpoints_and_totals(
        self, job_id: int | None = None
    ) -> tuple[tuple[Checkpoint, ...], tuple[CheckpointTotal, ...]]:
        return self.checkpoints(job_id), self.totals

    def remove_checkpoints(self, names: list[str], older_s: float | None) -> Removed:
        self.asked.append((names, older_s))
        return self.removed


Serve = Callable[[Vhpcd], Vhpcd]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """A function that lets the commands ask this vhpcd."""
    monkeypatch.setattr(options, "config", Config)
    monkeypatch.setattr(checkpoint_client, "POLL_S", 0.0)

    def ask(vhpcd: Vhpcd) -> Vhpcd:
        monkeypatch.setattr(leases, "client", lambda _: vhpcd)
        return vhpcd

    return ask


def test_each_phase_is_told_once(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    vhpcd = serve(Vhpcd(HOLDING, HOLDING, SAVING, VALID))
    assert main(["checkpoint", "1000", "--stop", "--name", "a"]) == 0
    assert vhpcd.asked == [(1000, "a", "stop")]
    said = capsys.readouterr()
    assert said.out == "1000.2\n"
    assert said.err.splitlines() == [
        "vhpc: checkpoint 1000.2 of job 1000: 1 of 2 nodes have stopped their guests",
        "vhpc: checkpoint 1000.2 of job 1000: 1 of 2 nodes have saved their guests",
        "vhpc: checkpoint 1000.2 of job 1000: valid, 150.0 MiB in 2.5 s",
    ]


def test_a_job_can_be_put_back_into_the_queue(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    vhpcd = serve(Vhpcd(replace(VALID, stop=True, requeue=True)))
    assert main(["checkpoint", "1000", "--requeue", "--json"]) == 0
    assert vhpcd.asked == [(1000, None, "requeue")]
    found = json.loads(capsys.readouterr().out)
    assert (found["stop"], found["requeue"]) == (True, True)
    assert main(["checkpoint", "1000", "--requeue", "--stop"]) == 1
    assert "--stop and --requeue cannot be given together" in capsys.readouterr().err


def test_a_checkpoint_that_was_given_up_is_an_error(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    failed = replace(HOLDING, state=CheckpointState.FAILED, error="n1: step 0 runs", running=True)
    serve(Vhpcd(HOLDING, failed, HOLDING, replace(failed, error="n1: weekended", running=False)))
    assert main(["checkpoint", "save", "1000"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[1:] == ["vhpc: job 1000 was not saved: n1: step 0 runs (the job continues)"]
    assert main(["checkpoint", "save", "1000"]) == 1
    assert "vhpc: job 1000 was not saved: n1: weekended" in capsys.readouterr().err.splitlines()


def test_json_has_all_of_a_checkpoint(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    serve(Vhpcd(VALID))
    assert main(["checkpoint", "1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["bytes"], found["encrypted"]) == (150 * MIB, False)
    assert (found["state"], found["job"], found["nodes"], found["seconds"]) == (
        "valid",
        1000,
        ["n1", "n2"],
        2.5,
    )
    assert found["guests"][1] == {
        "rank": 1,
        "hostname": "n2",
        "node": "n2",
        "cpus": 2,
        "memory_mib": 600,
        "state_bytes": 70 * MIB,
        "disk_bytes": 5 * MIB,
    }


OTHER = replace(VALID, serial=5, name="b", generation=Generation(1001, 0, "0123abce"))
AGAIN = replace(VALID, serial=6, resumed_by=Generation(1007, 0, "0123abcf"))
LATER = replace(VALID, serial=7, state=CheckpointState.FAILED, error="n2: no space left")


def test_a_list_has_notes(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    removed = replace(OTHER, name="gone", state=CheckpointState.REMOVED)
    serve(Vhpcd(known=(removed, OTHER, AGAIN, LATER)))
    assert main(["checkpoint", "ls", "--all", "--json"]) == 0
    names = [one["name"] for one in json.loads(capsys.readouterr().out)["checkpoints"]]
    assert names == ["gone", "b", "1000.2", "1000.2"]
    assert main(["checkpoint", "ls"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["NAME", "b", "1000.2", "1000.2"]
    assert rows[2].endswith("resumed by job 1007")
    assert rows[3].endswith("n2: no space left")
    assert main(["checkpoint", "ls", "--job", "1001", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == ["b"]


def test_a_list_ends_with_totals_and_limits(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    vhpcd = serve(Vhpcd(known=(OTHER,)))
    vhpcd.totals = (
        CheckpointTotal("user", "alice", 150 * MIB, 4096 * MIB, "students"),
        CheckpointTotal("account", "physics", 300 * MIB),
    )
    assert main(["checkpoint", "ls"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "Total of user alice: 150.0 MiB of 4.0 GiB (policy rule 'students')",
        "Total of account physics: 300.0 MiB",
    ]
    assert main(["checkpoint", "ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["totals"] == [
        {
            "owner": "user",
            "name": "alice",
            "bytes": 157286400,
            "limit_bytes": 4294967296,
            "rule": "students",
        },
        {"owner": "account", "name": "physics", "bytes": 314572800, "limit_bytes": None, "rule": None},
    ]


def test_a_name_means_its_newest_valid_checkpoint(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    serve(Vhpcd(known=(VALID, AGAIN, LATER, OTHER)))
    assert main(["checkpoint", "show", "1000.2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["serial"] == 6
    assert main(["checkpoint", "show", "1000.2"]) == 0
    text = capsys.readouterr().out
    assert "2, each with 2 CPUs and 600 MiB" in text
    assert "job 1007" in text


def test_an_unknown_name_is_an_error(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    serve(Vhpcd(known=(OTHER, replace(OTHER, name="gone", state=CheckpointState.REMOVED))))
    assert main(["checkpoint", "show", "gone"]) == 1
    assert capsys.readouterr().err == "vhpc: you have no checkpoint 'gone' (see: vhpc checkpoint ls)\n"


def test_names_that_are_not_removed_are_told(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    vhpcd = serve(Vhpcd())
    vhpcd.removed = Removed(("b",))
    assert main(["checkpoint", "rm", "b"]) == 0
    assert capsys.readouterr() == ("", "")
    vhpcd.removed = Removed(("b",), ("gone",), (InUse("c", "job 7 continues it"),))
    assert main(["checkpoint", "rm", "b", "gone", "c"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "vhpc: you have no checkpoint 'gone' (see: vhpc checkpoint ls)",
        "vhpc: checkpoint c is in use: job 7 continues it",
    ]
    assert main(["checkpoint", "rm", "b", "gone", "c", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "removed": ["b"],
        "missing": ["gone"],
        "in_use": [{"name": "c", "reason": "job 7 continues it"}],
    }
    assert vhpcd.asked[-1] == (["b", "gone", "c"], None)


@pytest.mark.parametrize(("age", "seconds"), [("12h", 43200.0), ("7d", 604800.0)])
def test_old_ones_are_removed(
    serve: Serve, age: str, seconds: float, capsys: pytest.CaptureFixture[str]
) -> None:
    vhpcd = serve(Vhpcd())
    vhpcd.removed = Removed(("a", "b"))
    assert main(["checkpoint", "rm", "--older-than", age]) == 0
    assert vhpcd.asked == [([], seconds)]
    assert capsys.readouterr().out == "a\nb\n"


@pytest.mark.parametrize("words", [["--older-than", "7"], ["--older-than", "-1d"], ["--older-than", ""], []])
def test_names_or_an_age_are_expected(
    serve: Serve, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    vhpcd = serve(Vhpcd())
    assert main(["checkpoint", "rm", *words]) == 1
    assert "expected" in capsys.readouterr().err
    assert main(["checkpoint", "rm", "a", "--older-than", "7d"]) == 1
    assert vhpcd.asked == []


@pytest.mark.parametrize("word", ["save-all", "-1", "1e3"])
def test_only_a_number_stands_for_a_job(serve: Serve, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    serve(Vhpcd())
    assert main(["checkpoint", word]) == 2
    assert word in capsys.readouterr().err


def test_a_word_that_is_no_job_id_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "abc"]) == 2
    said = capsys.readouterr().err
    assert "'abc' is neither a job id nor a verb of this command: save, ls, show, rm" in said
