# SPDX-License-Identifier: Apache-2.0
"""Prolog starts a keeper where jobs can be saved, and no job fails for lack of one."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import cast

import pytest
from boot_rig import GENERATION, boot_layout
from msgspec.structs import replace
from prolog_rig import Node, prolog_node
from stepd import needs_root

from vhpc_slurm.config.checkpoint import Checkpoint
from vhpc_slurm.device import PassthroughDevice
from vhpc_slurm.errors import NodeError
from vhpc_slurm.hooks import bringup
from vhpc_slurm.model import GuestPlan, NodePlan, RunningNode
from vhpc_slurm.node.boot import keeper
from vhpc_slurm.node.boot.state import Boot
from vhpc_slurm.node.host import process
from vhpc_slurm.node.resource.process import Process, ProcessData
from vhpc_slurm.node.store import joblock
from vhpc_slurm.node.store.journal import Journal, read_entries
from vhpc_slurm.node.store.layout import Layout

layout, node = boot_layout, prolog_node
pytestmark = needs_root
SLEEPS = ("-c", "import time; time.sleep(60)")


@pytest.fixture
def saving(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node where checkpoints are on, with a program that does nothing in the keeper's place."""
    config = replace(node.layout.config, checkpoint=Checkpoint(folder=str(node.layout.state / "saved")))
    node.layout = Layout(config)
    monkeypatch.setattr(keeper.KEEPER, "program", SLEEPS)
    return node


def entries(node: Node) -> list[ProcessData]:
    held = read_entries(node.layout.journals, GENERATION)
    return [entry.read(ProcessData) for entry in held if entry.kind == Process.kind]


def test_prolog_starts_a_keeper_that_lives_on(saving: Node) -> None:
    assert saving.run() == 0
    assert saving.state["status"] == "ready"
    (data,) = entries(saving)
    assert data.role == "keeper"
    assert data.ref is not None
    assert process.alive(data.ref)
    assert (data.ref, str(GENERATION)) in set(process.marked())
    process.end(data.ref)


def test_where_checkpoints_are_off_there_is_no_keeper(node: Node) -> None:
    assert node.run() == 0
    assert entries(node) == []


def test_guests_with_devices_have_no_keeper(saving: Node) -> None:
    device = PassthroughDevice("0000:0b:00.0", "gpu", 0, "pci0000:08", 4)
    guest = cast(GuestPlan, SimpleNamespace(devices=(device,)))
    journal = Journal(saving.layout.journals, GENERATION)
    keeper.start(saving.layout, journal, NodePlan(GENERATION, "n1", (guest,), 4096, 512))
    assert journal.held() == []


def test_a_keeper_that_cannot_be_started_fails_no_job(
    saving: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NodeError("cannot start it", "no memory")

    monkeypatch.setattr(process, "spawn", refuse)
    assert saving.run() == 0
    assert saving.state["status"] == "ready"
    assert entries(saving) == []
    assert "the job cannot be saved on this node: cannot start it: no memory" in caplog.text


def test_a_job_that_ended_meanwhile_gets_no_keeper(saving: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(work: Boot) -> Generator[None, None, RunningNode]:
        yield from ()
        joblock.write_tombstone(saving.layout, GENERATION)
        return RunningNode(work.plan, ())

    monkeypatch.setattr(bringup, "boot", ended)
    assert saving.run() == 0
    assert saving.held == []
    assert not list(process.marked(str(GENERATION)))
