# SPDX-License-Identifier: Apache-2.0
"""At the end of a run its AdminComment names the checkpoint with which it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from vhpc_slurm import slurm
from vhpc_slurm.config import Config
from vhpc_slurm.config.checkpoint import Checkpoint as Folder
from vhpc_slurm.controller.api.usage_messages import UsagePage
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import (
    Allocation,
    Checkpoint,
    CheckpointState,
    Figures,
    Generation,
    GuestUsage,
    LeaseRecord,
    LeaseState,
    NodeUsage,
)
from vhpc_slurm.node.store import outbox
from vhpc_slurm.node.store.outbox import Acknowledgement
from vhpc_slurm.reconcile import acknowledging
from vhpc_slurm.slurm.port import SlurmJob
from vhpc_slurm.slurm.sacct import AccountedJob

G = Generation(7, 1, "0123abcd")
IMAGE = "vhpc: image x@sha256:1"
USAGE = NodeUsage(G, "n1", (GuestUsage(0, Figures(cpu_us=1_000_000)),))
WORDS = "usage cpu_s=1.00 guests=1/1"
ON, OFF = Config(checkpoint=Folder(folder="/x")), Config()


def made(serial: int, generation: Generation = G, **more: object) -> Checkpoint:
    fields: dict[str, object] = {
        "name": f"7.{serial}", "uid": 2001, "image": "x", "state": CheckpointState.VALID, "created": 1.0,
        "stop": True, "node_count": 1,
    }  # fmt: skip
    return Checkpoint(serial=serial, generation=generation, **fields | more)  # type: ignore[arg-type]


@dataclass
class Site(ControllerClient):
    """vhpcd, slurmdbd and slurmctld; ``written`` has (who was told, text)."""

    state: str = "CANCELLED"
    comment: str = IMAGE
    checkpoints_made: tuple[Checkpoint, ...] = ()
    away: bool = False
    restarts: int = 2
    of_slurmctld: str = "PENDING"
    written: list[tuple[str, str]] = field(default_factory=list)

    # vhpcd

    def report_and_acknowledge(self, usage: NodeUsage, ack: object) -> bool:
        return True

    def usage(self, job_id: int, *, so_far: bool = False) -> tuple[UsagePage, tuple[NodeUsage, ...]]:
        page = UsagePage(
            generation=str(G), user="alice", state=LeaseState.RELEASED, nodes=1, memory_mib=1, taken=1,
            reported=(), more=None,
        )  # fmt: skip
        return page, (USAGE,)

    def leases(self, **_: object) -> list[LeaseRecord]:
        return []

    def checkpoints(self, job_id: int | None = None) -> tuple[Checkpoint, ...]:
        if self.away:
            raise FabricError("vhpcd does not answer")
        return self.checkpoints_made

    # slurmdbd

    def job(self, job_id: int) -> AccountedJob:
        return AccountedJob("7", self.state, 1, 1, "alice", self.comment)

    def set_comment(self, job: AccountedJob, text: str) -> None:
        self.written.append(("slurmdbd", text))

    # slurmctld

    def load_with_comment(self, job_id: int) -> tuple[SlurmJob, str]:
        names = (self.of_slurmctld, "", 2001, 2001, "alice", "main", "job", "/", "")
        return SlurmJob(job_id, self.restarts, *names, Allocation(())), self.comment

    def set_admin_comment(self, job: int, text: str) -> None:
        self.written.append(("slurmctld", text))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    outbox.put(tmp_path / "outbox", Acknowledgement(G, "n1", clean=True, usage=USAGE))
    return tmp_path / "outbox"


def ended(site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch, config: Config = ON) -> list[object]:
    monkeypatch.setattr(slurm, "accounting", lambda *_: site)
    monkeypatch.setattr(slurm, "commands", lambda *_: site)
    assert acknowledging.deliver(config, site, folder) == 0
    return list(site.written)


def test_a_stopped_job_names_the_newest_checkpoint_of_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = made(9, Generation(7, 0, "0123abcd"))
    site = Site(checkpoints_made=(made(1, stop=False), made(2), other))
    assert ended(site, folder, monkeypatch) == [
        ("slurmdbd", f"{IMAGE}; stopped with checkpoint 7.2; {WORDS}")
    ]


def test_figures_from_before_stay_at_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(comment=f"{IMAGE}; usage cpu_s=9.00 guests=1/1", checkpoints_made=(made(2),))
    assert ended(site, folder, monkeypatch) == [
        ("slurmdbd", f"{IMAGE}; stopped with checkpoint 7.2; {WORDS}")
    ]


def test_a_job_that_was_not_saved_in_time_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = made(2, state=CheckpointState.FAILED, requeue=True, error="n1: a step runs")
    site = Site(state="TIMEOUT", checkpoints_made=(made(1, stop=False), failed))
    assert ended(site, folder, monkeypatch) == [
        ("slurmdbd", f"{IMAGE}; not saved before its end: checkpoint 7.2: n1: a step runs; {WORDS}")
    ]


@pytest.mark.parametrize(
    ("site", "config"),
    [(Site(), ON), (Site(away=True), ON), (Site(checkpoints_made=(made(1),)), OFF)],
    ids=["none", "away", "off"],
)
def test_without_checkpoints_there_are_only_figures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, site: Site, config: Config
) -> None:
    assert ended(site, folder, monkeypatch, config) == [("slurmdbd", f"{IMAGE}; {WORDS}")]


def test_text_of_another_program_stays_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(comment="JS1:H4sI", checkpoints_made=(made(1),))
    assert ended(site, folder, monkeypatch) == []


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED"])
@pytest.mark.parametrize("of_slurmctld", ["PENDING", "COMPLETING"])
def test_a_requeued_job_names_it_until_its_next_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, state: str, of_slurmctld: str
) -> None:
    site = Site(state=state, checkpoints_made=(made(1, requeue=True),), comment=f"{IMAGE} // of the site")
    site.of_slurmctld = of_slurmctld
    assert ended(site, folder, monkeypatch) == [
        ("slurmctld", f"{IMAGE}; requeued with checkpoint 7.1 // of the site")
    ]


@pytest.mark.parametrize("changed", [{"of_slurmctld": "RUNNING"}, {"restarts": 3}], ids=["runs", "later"])
def test_the_comment_of_a_later_run_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, object]
) -> None:
    site = Site(state="PENDING", checkpoints_made=(made(1, requeue=True),), **changed)  # type: ignore[arg-type]
    assert ended(site, folder, monkeypatch) == []
