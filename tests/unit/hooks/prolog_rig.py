# SPDX-License-Identifier: Apache-2.0
"""A node during one Prolog; what its boot does is put in, what Slurm and vhpcd hear is noted."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
from boot_rig import GENERATION, NODE, lease
from node_rig import publish

from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.wire_types import LeaseWire
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.hooks import bringup, common, prolog
from vhpc_slurm.model import Lease, NodeReport, RunningNode
from vhpc_slurm.node.boot.state import Boot
from vhpc_slurm.node.guest import libvirtd, shares
from vhpc_slurm.node.host import inventory
from vhpc_slurm.node.store import statefile
from vhpc_slurm.node.store.journal import read_entries
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.outbox import Acknowledgement
from vhpc_slurm.slurm.port import NotRequeueableError
from vhpc_slurm.slurm.scontrol import Scontrol

DAEMON = 1  # an account that every machine has


def booted(work: Boot) -> Generator[None, None, RunningNode]:
    """A boot that takes no time."""
    yield from ()
    return RunningNode(work.plan, ())


@dataclass
class Node:
    """This node during one Prolog: what the boot does is put in, what Slurm and vhpcd hear is noted."""

    layout: Layout
    lease: Lease
    drained: list[str] = field(default_factory=list)
    requeued: list[int] = field(default_factory=list)
    acknowledged: list[Acknowledgement] = field(default_factory=list)
    answers: list[Lease | VhpcError] = field(default_factory=list)
    """What vhpcd answers to the next questions; afterwards the lease."""
    outcome: BaseException | None = None
    waits: int = 0
    told: list[tuple[str, str, tuple[str, str]]] = field(default_factory=list)
    may_requeue: bool = True
    reports: list[NodeReport] = field(default_factory=list)
    comments: list[tuple[int, str]] = field(default_factory=list)

    def ask(self, *_: object) -> Lease:
        answer = self.answers.pop(0) if self.answers else self.lease
        if isinstance(answer, VhpcError):
            raise answer
        return answer

    def boot(self, work: Boot) -> Generator[None, None, RunningNode]:
        work.journal.acquire("image", "image:x", digest="sha256:" + "0" * 64)
        for _ in range(self.waits):
            yield
        if self.outcome is not None:
            raise self.outcome
        return (yield from booted(work))

    def requeue(self, job_id: int) -> None:
        if not self.may_requeue:
            raise NotRequeueableError("scontrol requeue failed", "Requested operation is presently disabled")
        self.requeued.append(job_id)

    def run(self) -> int:
        return prolog.run(self.layout.config)

    @property
    def state(self) -> dict[str, str]:
        """What the SPANK plugin reads."""
        return statefile.read_state(self.layout.state_file(42))

    @property
    def held(self) -> list[str]:
        """Kinds in the journal of the generation."""
        return [entry.kind for entry in read_entries(self.layout.journals, GENERATION)]


@pytest.fixture(name="node")
def prolog_node(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Node:
    found = Node(layout, lease(publish(layout), uid=DAEMON))
    layout.journals.mkdir(parents=True)
    for name, value in (("JOB_ID", "42"), ("JOB_UID", str(DAEMON))):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(ControllerClient, "lease", found.ask)
    monkeypatch.setattr(
        ControllerClient, "look", lambda *asked: LeaseWire.pack(found.ask(*asked)).brief().unpack()
    )
    monkeypatch.setattr(ControllerClient, "acknowledge", lambda _, ack: found.acknowledged.append(ack))
    monkeypatch.setattr(
        ControllerClient, "report_timeline", lambda _, _line, report: found.reports.append(report)
    )
    monkeypatch.setattr(Scontrol, "requeue", lambda _, job_id: found.requeue(job_id))
    monkeypatch.setattr(
        Scontrol, "set_admin_comment", lambda _, job_id, text: found.comments.append((job_id, text))
    )
    monkeypatch.setattr(common, "drain", lambda _config, _node, err: found.drained.append(err.line()))
    monkeypatch.setattr(inventory, "read_inventory", lambda *_: NODE)
    monkeypatch.setattr(shares, "of_job", lambda *_: ())
    monkeypatch.setattr(libvirtd, "connect", lambda *_: nullcontext())
    monkeypatch.setattr(bringup, "boot", found.boot)
    return found
