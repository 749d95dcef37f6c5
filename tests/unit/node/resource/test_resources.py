# SPDX-License-Identifier: Apache-2.0
"""Every kind of resource, with kill -9 at each step of taking and of releasing it: nothing is left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_fmpm import fake_fmpm
from kill_rig import before, kills
from network_lab import real_cluster
from node_rig import node_layout
from resource_cases import CASES, GENERATION, Case, Host
from stepd import needs_root

from vhpc_slurm import files
from vhpc_slurm.node.devices.nvswitch import Fmpm
from vhpc_slurm.node.host import attribute
from vhpc_slurm.node.network import tools
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.store.journal import Journal, generations
from vhpc_slurm.node.store.layout import Layout

layout, fmpm, cluster = node_layout, fake_fmpm, real_cluster
pytestmark = [needs_root, pytest.mark.xdist_group("cgroup")]


@pytest.fixture(params=sorted(CASES))
def case(
    request: pytest.FixtureRequest, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Case]:
    """A kind of resource; the steps of taking and releasing it are those of ``kill_rig`` and these calls."""
    host = Host(layout, tmp_path, monkeypatch, request.getfixturevalue)
    with host.opened:
        found = CASES[request.param](host)
        monkeypatch.setattr(files, "write", before(files.write))  # among others the journal's lines
        monkeypatch.setattr(tools, "run", before(tools.run))
        monkeypatch.setattr(attribute, "write_attribute", before(attribute.write_attribute))
        monkeypatch.setattr(Fmpm, "_run", before(Fmpm._run))
        monkeypatch.setattr(signal, "pidfd_send_signal", before(signal.pidfd_send_signal))
        yield found
        release(found)


def take(case: Case) -> None:
    journal = Journal(case.layout.journals, GENERATION)
    case.take(journal)
    journal.close()


def release(case: Case) -> None:
    journal = Journal(case.layout.journals, GENERATION)
    assert registry.release_all(case.layout, journal) == []
    journal.remove()


def left(case: Case) -> list[object]:
    return [*case.left(), *generations(case.layout.journals)]


def test_each_kind_is_tested_here() -> None:
    assert {resource.kind for resource in registry.RESOURCES} == {name.partition("/")[0] for name in CASES}


@pytest.mark.long
def test_a_kill_at_any_step_of_taking_leaves_nothing(case: Case) -> None:
    assert left(case) == []
    steps = 0
    for step in kills(lambda: take(case)):
        steps, seen = steps + 1, left(case)
        release(case)
        assert left(case) == [], f"killed at step {step}, which left {seen}"
    assert steps >= 1, "the journal's entry is a step"
    assert left(case) != [GENERATION], "it has been taken"
    release(case)
    assert left(case) == []


@pytest.mark.long
def test_a_kill_at_any_step_of_the_release_leaves_nothing(case: Case) -> None:
    assert left(case) == []
    take(case)
    steps = 0
    for step in kills(lambda: release(case)):
        steps, seen = steps + 1, left(case)
        release(case)
        assert left(case) == [], f"killed at step {step}, which left {seen}"
        take(case)
    assert steps >= 2, "the journal's note and its removal are steps"
    assert left(case) == []
