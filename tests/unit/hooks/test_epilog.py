# SPDX-License-Identifier: Apache-2.0
"""The Epilog tells vhpcd what became of a job, also where it fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from vhpc_slurm.config import Config, Paths
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, NodeError, TeardownError, VhpcError
from vhpc_slurm.hooks import common, epilog
from vhpc_slurm.model import Figures, Generation, GuestUsage, NodeUsage
from vhpc_slurm.node import teardown
from vhpc_slurm.node.devices import quarantine
from vhpc_slurm.node.store import joblock, statefile, timeline, usage
from vhpc_slurm.node.store.journal import Journal, generations
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.outbox import Acknowledgement
from vhpc_slurm.reconcile import drain_policy


def no_lease(*_: object) -> None:
    raise FabricError("vhpcd has no lease of job 7")


def test_an_alarm_of_the_prolog_reaches_vhpcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = Paths(state=str(tmp_path / "state"), run=str(tmp_path / "run"), log=str(tmp_path / "log"))
    layout, generation = Layout(Config(paths=paths)), Generation(7, 0, "0123abcd")
    layout.job(7).mkdir(parents=True)
    fields = statefile.header(generation, "debian:latest") | {"status": "failed", "alarm": "odd XML"}
    statefile.write_state(layout.state_file(7), fields, os.getuid())
    layout.journals.mkdir(parents=True)
    journal = Journal(layout.journals, generation)
    journal.acquire("rundir", "rundir:x", path=str(layout.job(7)))
    journal.close()
    said: list[Acknowledgement] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("SLURM_JOB_UID", "2001")
    monkeypatch.setattr(ControllerClient, "look", no_lease)
    monkeypatch.setattr(ControllerClient, "acknowledge", lambda _, ack: said.append(ack))
    assert epilog.run(layout.config) == 0
    assert [(ack.clean, ack.note) for ack in said] == [(True, "alarm: odd XML")]
    assert not layout.job(7).exists()


@pytest.mark.promise("boot.time-limit")
def test_a_time_limit_that_ended_the_boot_reaches_vhpcd(ending: Ending) -> None:
    recorder = timeline.Recorder(ending.layout.timeline(GENERATION), GENERATION, "n1")
    why = "failed: the time limit ended the job in the boot of its guests on n1: it took 61 s"
    recorder.note("agent g0", timeline.now(), detail=why)
    assert epilog.run(ending.layout.config) == 0
    assert [ack.note for ack in ending.acknowledged] == [why.replace("failed:", "told:")]


def test_a_quarantined_device_does_not_delay_the_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, run = tmp_path / "state", tmp_path / "run"
    config = Config(paths=Paths(state=str(state), run=str(run), log=str(tmp_path / "log")))
    layout, generation = Layout(config), Generation(7, 0, "0123abcd")
    layout.journals.mkdir(parents=True)
    Journal(layout.journals, generation).acquire("rundir", "rundir:x", path=str(tmp_path / "x"))
    quarantined = quarantine.QuarantinedError(
        [quarantine.record("0000:42:00.0", "gpu", "it no longer exists")]
    )

    def clear(*_: object) -> None:
        raise quarantined

    said: list[Acknowledgement] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("SLURM_JOB_UID", "2001")
    monkeypatch.setattr(teardown, "clear", clear)
    monkeypatch.setattr(common, "drain", lambda *_: None)
    monkeypatch.setattr(ControllerClient, "look", no_lease)
    monkeypatch.setattr(ControllerClient, "acknowledge", lambda _, ack: said.append(ack))
    with pytest.raises(TeardownError):
        epilog.run(config)
    assert [(ack.generation, ack.clean) for ack in said] == [(generation, True)]
    assert list(layout.outbox.glob("*.json")) == []


# --- each kind of failure ---------------------------------------------------------------

GENERATION = Generation(7, 0, "0123abcd")


@dataclass
class Ending:
    """The end of job 7 on this node, which holds a run folder; what Slurm and vhpcd hear is noted."""

    layout: Layout
    drained: list[str] = field(default_factory=list)
    acknowledged: list[Acknowledgement] = field(default_factory=list)

    def fail(self, monkeypatch: pytest.MonkeyPatch, error: VhpcError) -> None:
        """Have the teardown end so."""

        def clear(*_: object) -> None:
            raise error

        monkeypatch.setattr(teardown, "clear", clear)


@pytest.fixture
def ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ending:
    paths = Paths(state=str(tmp_path / "state"), run=str(tmp_path / "run"), log=str(tmp_path / "log"))
    found = Ending(Layout(Config(paths=paths)))
    found.layout.journals.mkdir(parents=True)
    found.layout.job(7).mkdir(parents=True)
    journal = Journal(found.layout.journals, GENERATION)
    journal.acquire("rundir", "rundir:x", path=str(found.layout.job(7)))
    journal.close()

    def unreachable(*_: object) -> None:
        raise FabricError("vhpcd does not answer")

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(ControllerClient, "look", unreachable)
    monkeypatch.setattr(ControllerClient, "acknowledge", lambda _, ack: found.acknowledged.append(ack))
    monkeypatch.setattr(common, "drain", lambda _config, _node, err: found.drained.append(err.line()))
    return found


def test_without_vhpcd_the_node_is_cleared_all_the_same(ending: Ending) -> None:
    assert epilog.run(ending.layout.config) == 0
    assert list(generations(ending.layout.journals)) == []
    assert joblock.has_tombstone(ending.layout, GENERATION)
    assert [(ack.generation, ack.clean) for ack in ending.acknowledged] == [(GENERATION, True)]
    assert not ending.layout.job(7).exists()


def test_usage_is_sent_with_the_acknowledgement(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    guest = GuestUsage(0, Figures(cpu_us=5))
    usage.keep(ending.layout.usage(GENERATION), [guest])
    reported: list[NodeUsage] = []

    def report(_: ControllerClient, what: NodeUsage, ack: Acknowledgement) -> bool:
        reported.append(what)
        ending.acknowledged.append(ack)
        return False

    monkeypatch.setattr(ControllerClient, "report_and_acknowledge", report)
    assert epilog.run(ending.layout.config) == 0
    assert reported == [NodeUsage(GENERATION, "n1", (guest,))]
    assert [ack.usage for ack in ending.acknowledged] == reported


def test_an_acknowledgement_waits_for_a_silent_vhpcd(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise FabricError("vhpcd does not answer")

    monkeypatch.setattr(ControllerClient, "acknowledge", unreachable)
    assert epilog.run(ending.layout.config) == 0
    assert len(list(ending.layout.outbox.glob("*.json"))) == 1
    assert ending.drained == []


def test_a_second_epilog_finds_nothing_and_succeeds(ending: Ending) -> None:
    assert epilog.run(ending.layout.config) == 0
    assert epilog.run(ending.layout.config) == 0
    assert len(ending.acknowledged) == 1
    assert ending.drained == []


@pytest.mark.parametrize("kind", [TeardownError, NodeError, FabricError])
def test_leftovers_drain_the_node_and_are_reported_to_vhpcd(
    ending: Ending, monkeypatch: pytest.MonkeyPatch, kind: Callable[[str, str], VhpcError]
) -> None:
    ending.fail(monkeypatch, kind("job 7 left 1 resources behind", "domain vhpc-7-0-0123abcd-g0 still runs"))
    with pytest.raises(TeardownError, match="vhpc-7-0-0123abcd-g0 still runs"):
        epilog.run(ending.layout.config)
    assert len(ending.drained) == 1
    assert [(ack.clean, ack.note) for ack in ending.acknowledged] == [
        (False, "job 7 left 1 resources behind: domain vhpc-7-0-0123abcd-g0 still runs")
    ]


@pytest.mark.parametrize(("missed", "drains"), [(False, 0), (True, 1)])
def test_a_quarantined_device_drains_only_if_slurm_misses_it(
    ending: Ending, monkeypatch: pytest.MonkeyPatch, missed: bool, drains: int
) -> None:
    record = quarantine.record("0000:42:00.0", "vf", "still has a GUID")
    ending.fail(monkeypatch, quarantine.QuarantinedError([record]))
    monkeypatch.setattr(drain_policy, "must_drain", lambda *_: missed)
    if missed:
        with pytest.raises(TeardownError):
            epilog.run(ending.layout.config)
    else:
        assert epilog.run(ending.layout.config) == 0
    assert len(ending.drained) == drains
    assert [ack.clean for ack in ending.acknowledged] == [True]


def test_a_hook_that_slurm_did_not_call_is_refused(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(NodeError, match="a hook that only Slurm can run"):
        epilog.run(ending.layout.config)
    assert list(generations(ending.layout.journals)) == [GENERATION]
