# SPDX-License-Identifier: Apache-2.0
"""The health check drains a node for what it cannot repair there, and for nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, TeardownError
from vhpc_slurm.hooks import healthcheck
from vhpc_slurm.model import Generation, LeaseRecord
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import audit, run
from vhpc_slurm.reconcile.finding import RepairResult, repair

NO_FAULT_OF_THE_NODE = {
    "controller",
    "outbox",
    "refused-acknowledgement",
    "lost-start",
    "left-node",
    "libvirt-busy",
    "lost-keeper",
    "lost-follower",
    "orphan-checkpoint",
}


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    return tmp_path / "calls"


def config_in(folder: Path) -> Config:
    return Config(paths=type(Config().paths)(state=str(folder / "state"), run=str(folder / "run")))


def health(calls: Path, monkeypatch: pytest.MonkeyPatch, *results: RepairResult) -> int:
    monkeypatch.setattr(healthcheck, "reconcile", lambda *args, **options: list(results))
    return healthcheck.run(Config(controller=Controller(slurm_bin=str(calls.parent))))


@pytest.mark.parametrize("kind", Kind)
def test_only_faults_of_the_node_drain_it(calls: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    failed = RepairResult(kind, "guest 7 is left", repaired=False, error="libvirt is gone")
    code = health(calls, monkeypatch, failed)
    if kind.value in NO_FAULT_OF_THE_NODE:
        assert (code, calls.exists()) == (0, False)
        return
    assert code == 1
    assert calls.read_text() == (
        "update NodeName=n1 State=DRAIN Reason=vhpc: guest 7 is left: libvirt is gone (vhpc reconcile)\n"
    )


def test_a_repaired_finding_drains_nothing(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repaired = [RepairResult(kind, "it is gone", repaired=True) for kind in Kind]
    assert health(calls, monkeypatch, *repaired) == 0
    assert health(calls, monkeypatch) == 0
    assert not calls.exists()


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (None, ""),
        (TeardownError("it stays", "busy", "wait"), "it stays: busy (wait)"),
        (OSError(13, "Permission denied"), "[Errno 13] Permission denied"),
    ],
)
def test_a_repair_that_fails_says_why(raised: Exception | None, error: str) -> None:
    tried: list[str] = []

    def act() -> None:
        tried.append("tried")
        if raised is not None:
            raise raised

    finding = NodeFinding(Kind.ORPHAN_PIN, "a pin", act)
    assert repair(finding, check=True) == RepairResult(Kind.ORPHAN_PIN, "a pin", repaired=False)
    assert tried == []
    result = repair(finding, check=False)
    assert result == RepairResult(Kind.ORPHAN_PIN, "a pin", repaired=raised is None, error=error)


def test_without_vhpcd_no_generation_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[object] = []

    def refuse(*_: object, **__: object) -> None:
        raise FabricError("vhpcd does not answer")

    def note(live: object) -> list[NodeFinding]:
        seen.append(live)
        return []

    monkeypatch.setattr(ControllerClient, "leases", refuse)
    monkeypatch.setattr(audit, "audit", lambda _, node, live, *others: note(live))
    config = config_in(tmp_path)
    (result,) = run.reconcile(config, "n1", check=False)
    assert (result.kind, result.repaired, result.what) == ("controller", False, "vhpcd does not answer")
    assert seen == [None]


def test_a_job_that_starts_while_vhpcd_answers_is_not_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = config_in(tmp_path)
    layout = Layout(config)
    old, new = (Generation.parse(f"100000000{number}.0.0123abcd") for number in range(2))

    def begin(generation: Generation) -> None:
        journal = Journal(layout.journals, generation)
        journal.acquire("uid", "uid:1", uid=1)
        journal.close()

    def leases(*_: object, **__: object) -> list[LeaseRecord]:
        begin(new)
        return []

    monkeypatch.setattr(ControllerClient, "leases", leases)
    begin(old)
    for over in ([old], [old, new]):
        results = run.reconcile(config, "n1", check=True)
        found = [one.what for one in results if one.kind == "stale-generation"]
        assert [str(one) in what for one, what in zip(over, found, strict=True)] == [True] * len(over)
