# SPDX-License-Identifier: Apache-2.0
"""The Epilog tells vhpcd what became of a job, also where it fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vhpc_slurm.config import Config, Paths
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import TeardownError
from vhpc_slurm.hooks import common, epilog
from vhpc_slurm.model import Generation
from vhpc_slurm.node import teardown
from vhpc_slurm.node.devices import quarantine
from vhpc_slurm.node.store import statefile
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.outbox import Acknowledgement


def test_what_a_prolog_wants_somebody_to_hear_of_goes_to_vhpcd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(ControllerClient, "lease", lambda *_: None)
    monkeypatch.setattr(ControllerClient, "acknowledge", lambda _, ack: said.append(ack))
    assert epilog.run(layout.config) == 0
    assert [(ack.clean, ack.note) for ack in said] == [(True, "alarm: odd XML")]
    assert not layout.job(7).exists()


def test_a_device_in_quarantine_keeps_no_acknowledgement_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, run = tmp_path / "state", tmp_path / "run"
    config = Config(paths=Paths(state=str(state), run=str(run), log=str(tmp_path / "log")))
    layout, generation = Layout(config), Generation(7, 0, "0123abcd")
    layout.journals.mkdir(parents=True)
    Journal(layout.journals, generation).acquire("rundir", "rundir:x", path=str(tmp_path / "x"))
    quarantined = quarantine.QuarantinedError(
        [quarantine.record("0000:42:00.0", "gpu", "it is not there any more")]
    )

    def clear(*_: object) -> None:
        raise quarantined

    said: list[Acknowledgement] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("SLURM_JOB_UID", "2001")
    monkeypatch.setattr(teardown, "clear", clear)
    monkeypatch.setattr(common, "drain", lambda *_: None)
    monkeypatch.setattr(ControllerClient, "lease", lambda *_: None)
    monkeypatch.setattr(ControllerClient, "acknowledge", lambda _, ack: said.append(ack))
    with pytest.raises(TeardownError):
        epilog.run(config)
    assert [(ack.generation, ack.clean) for ack in said] == [(generation, True)]
    assert list(layout.outbox.glob("*.json")) == []
