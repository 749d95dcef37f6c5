# SPDX-License-Identifier: Apache-2.0
"""Whether pyslurm is used: its version, ``auto``, and what vhpc doctor says of it."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_pyslurm
import pytest
from doctor_rig import one
from pyslurm_rig import Adapter, Site, kill, opened

from vhpc_slurm import slurm
from vhpc_slurm.cli.host.checks import Level, slurmaccess
from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.slurm.port import SlurmError
from vhpc_slurm.slurm.pyslurm_adapter import PySlurm, misfit
from vhpc_slurm.slurm.pyslurm_client import UnusableError, Versions
from vhpc_slurm.slurm.scontrol import Scontrol


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield from opened(tmp_path, monkeypatch)


# --- versions, auto, doctor -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pyslurm", "built", "running", "why"),
    [
        ("25.11.2", "25.11.1", "25.11.4", ""),
        ("25.5.0", "25.05.3", "25.05.0", ""),
        ("25.11.2", "", "25.11.0-1", ""),
        ("25.5.0", "25.05.3", "25.11.4", "another release than Slurm 25.11.4"),
        ("25.11.2", "25.05.1", "25.11.4", "another release"),
        ("24.11.0", "24.11.5", "24.11.5", "too old: vhpc uses pyslurm from 25.05 on"),
        ("", "", "25.11.1", ""),
        ("25.11.2", "25.11.1", "", "not recognized"),
    ],
)
def test_versions_must_be_of_one_release(pyslurm: str, built: str, running: str, why: str) -> None:
    found = misfit(Versions(pyslurm, built), running)
    assert why in found
    assert bool(found) == bool(why)


def test_another_release_is_refused_before_any_question(site: Site) -> None:
    site.change(version="25.5.0", built="25.05.0")
    with pytest.raises(UnusableError, match="another release than Slurm 25"):
        site.connect().load(2)
    with pytest.raises(UnusableError, match="another release than Slurm 25"):
        slurm.connect(site.config("pyslurm"))
    assert fake_pyslurm.requests(site.package) == []


def test_an_upgrade_of_slurm_is_noticed_by_the_next_process(site: Site) -> None:
    port = site.connect()
    port.load(2)
    (site.folder / "version").write_text("26.05.1")
    kill(site.pid())
    with pytest.raises(UnusableError, match="another release than Slurm 26"):
        port.load(2)


def test_auto_uses_commands_for_a_while_after_a_failure(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = site.connect(fall_back=True)
    site.change(behaviour="exit")
    assert port.load(2) == site.expected()
    asked = len(fake_pyslurm.requests(site.package))
    assert port.load(2) == site.expected()
    assert len(fake_pyslurm.requests(site.package)) == asked
    assert caplog.text.count("Slurm's commands are used for 300 s instead of pyslurm") == 1
    site.change(behaviour="")
    now = time.monotonic()
    monkeypatch.setattr("vhpc_slurm.slurm.pyslurm_adapter.time.monotonic", lambda: now + 301)
    caplog.set_level(logging.INFO)
    assert port.load(2) == site.expected()
    assert len(fake_pyslurm.requests(site.package)) > asked
    assert "pyslurm 25.11.2 (built with Slurm 25.11.1) is used again" in caplog.text


def test_auto_logs_its_choice_at_the_start(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert slurm.connect(site.config("auto")).load(2) == site.expected()
    assert "Slurm is asked by pyslurm 25.11.2 (built with Slurm 25.11.1)" in caplog.text
    site.change(layouts={})
    assert slurm.connect(site.config("auto")).load(2) == site.expected()
    assert "Slurm's commands are used for 300 s instead of pyslurm: pyslurm 25.11.2" in caplog.text
    assert "set controller.slurm_adapter" not in caplog.text  # it is set
    (site.package / "__init__.py").unlink()
    assert type(slurm.connect(site.config("scontrol"))) is Scontrol


def test_auto_without_pyslurm_is_slurms_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vhpc_slurm.slurm.pyslurm_adapter.installed", lambda: False)
    monkeypatch.setattr("vhpc_slurm.slurm.choice.installed", lambda: False)
    config = Config(controller=Controller(slurm_bin=str(tmp_path), slurm_adapter="auto"))
    assert type(slurm.connect(config)) is Scontrol
    with pytest.raises(SlurmError, match="it is not installed for vhpc's Python"):
        slurm.connect(Config(controller=Controller(slurm_bin=str(tmp_path), slurm_adapter="pyslurm")))


def test_auto_waits_for_a_hanging_import_only_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vhpc_slurm.slurm.choice.PySlurm", functools.partial(PySlurm, start_s=0.5))
    site.change(**{"import": "hang"})
    port = slurm.connect(site.config("auto"))
    hung = site.pid()
    assert port.load(2) == site.expected()
    assert site.pid() == hung  # no other was started


def test_vhpcd_starts_while_slurmctld_does_not_answer(site: Site) -> None:
    site.change(behaviour="refused")
    port = slurm.connect(site.config("pyslurm"))
    site.change(behaviour="")
    assert port.load(2) == site.expected()


@pytest.mark.parametrize(
    ("adapter", "scenario", "level", "says"),
    [
        ("scontrol", {}, Level.OK, "by Slurm's commands (slurm_adapter = scontrol)"),
        ("pyslurm", {}, Level.OK, "by pyslurm 25.11.2 (built with Slurm 25.11.1)"),
        ("auto", {}, Level.OK, "by pyslurm 25.11.2 (built with Slurm 25.11.1)"),
        ("pyslurm", {"layouts": {}}, Level.ERROR, "without CPUs"),
        ("auto", {"layouts": {}}, Level.WARN, "by Slurm's commands: pyslurm 25.11.2"),
        ("auto", {"version": "25.5.0"}, Level.WARN, "another release than Slurm 25.11.4"),
        ("pyslurm", {"import": "exit"}, Level.ERROR, "Unable to process configuration file"),
        ("pyslurm", {"behaviour": "refused"}, Level.WARN, "was not checked"),
    ],
)
def test_doctor_shows_the_adapter_and_its_reason(
    site: Site, adapter: Adapter, scenario: dict[str, Any], level: Level, says: str
) -> None:
    site.change(**scenario)
    found = one(list(slurmaccess.check(site.config(adapter))), "slurm.adapter")
    assert found.level is level
    assert says in found.what
    assert "set controller.slurm_adapter" not in found.what  # of two hints, doctor gives its own
    assert bool(found.hint) == (level is not Level.OK)


def test_doctor_finds_no_fault_in_auto_without_pyslurm(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vhpc_slurm.slurm.pyslurm_adapter.installed", lambda: False)
    monkeypatch.setattr("vhpc_slurm.slurm.choice.installed", lambda: False)
    found = one(list(slurmaccess.check(site.config("auto"))), "slurm.adapter")
    assert found.level is Level.OK
    assert "by Slurm's commands: pyslurm is not installed for vhpc's Python" in found.what
