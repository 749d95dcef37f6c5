# SPDX-License-Identifier: Apache-2.0
"""An Epilog that is killed at any point: reconciliation finishes its work, whatever Slurm says of the job."""

from __future__ import annotations

import dataclasses
import signal

import pytest
from kill_rig import before, kills
from network_lab import lease_of
from node_rig import node_layout, publish, spawn
from stepd import needs_root

from vhpc_slurm import files, slurm
from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError
from vhpc_slurm.hooks import epilog
from vhpc_slurm.model import Generation, LeaseRecord, LeaseState
from vhpc_slurm.node import teardown
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.host import process, steps
from vhpc_slurm.node.resource import registry, reservations
from vhpc_slurm.node.resource import uid as uids
from vhpc_slurm.node.store import disks, joblock, pins
from vhpc_slurm.node.store.journal import Journal, generations
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.outbox import Acknowledgement
from vhpc_slurm.reconcile import audit, ended_jobs, run

GENERATION = Generation(7, 0, "00000007")
FILES_ONLY = {
    *(Kind.STALE_GENERATION, Kind.ORPHAN_FOLDER, Kind.ORPHAN_UID, Kind.ORPHAN_PIN, Kind.ORPHAN_DISK),
}
"""The other findings are about processes, control groups and networks of the whole machine."""

layout = node_layout


class Node:
    """Node n1, on which job 7 has ended for its Epilog only: Slurm runs it, and its lease is live."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.acknowledged: list[Acknowledgement] = []
        self.daemon: process.ProcessRef | None = None
        self.digest = ""

    def take(self) -> None:
        """Take one resource of each kind that can be taken without a guest."""
        layout, name = self.layout, str(GENERATION)
        self.acknowledged.clear()
        joblock.sweep(layout, older_than_s=-1.0)
        journal = Journal(layout.journals, GENERATION)
        folder = layout.job(7)
        journal.acquire("rundir", f"rundir:{folder}", path=str(folder))
        folder.mkdir(parents=True)
        (folder / "g0").mkdir()
        (folder / "g0/console.log").touch()
        journal.acquire("claim", "reservation", cpus=[0])
        image = publish(layout)
        journal.acquire("image", f"image:{image.digest}", digest=image.digest)
        pins.pin(layout, image, name)
        uid = uids.allocate(layout, name, lambda uid: journal.acquire("uid", f"uid:{uid}", uid=uid) and None)
        journal.acquire("disk", "disk:g0", index=0)
        layout.disks.mkdir(exist_ok=True)
        disks.path(layout, GENERATION, 0).touch()
        journal.acquire("process", "process:g0:virtiofsd", role="virtiofsd")
        self.daemon = spawn("sleep", "600", generation=name)
        journal.update("process:g0:virtiofsd", pid=self.daemon.pid, started=self.daemon.started)
        journal.acquire("domain", "domain:vhpc-none", name="vhpc-7-0-00000007-g0", uid=uid)
        journal.close()

    def left(self) -> dict[str, object]:
        """Objects of the job that the node still has."""
        layout = self.layout
        assert self.daemon is not None
        found: dict[str, object] = {
            "journals": list(generations(layout.journals)),
            "folders": list(layout.jobs.iterdir()),
            "uids": list(uids.allocated(layout)),
            "pins": list(pins.pins(layout)),
            "disks": list(layout.disks.iterdir()),
            "processes": [self.daemon] if process.alive(self.daemon) else [],
            "acknowledgements": [path.name for path in layout.outbox.glob("*.json")],
        }
        return {name: what for name, what in found.items() if what}

    def epilog(self) -> None:
        """Run the Epilog; its actions besides files are steps too, and get no answer."""
        files.write = before(files.write)
        signal.pidfd_send_signal = before(signal.pidfd_send_signal)
        epilog.run(self.layout.config)

    def reported(self, _usage: object, ack: Acknowledgement) -> bool:
        """As vhpcd takes usage and acknowledgement; other nodes have not reported."""
        self.acknowledged.append(ack)
        return False

    def leases(self, *_: object, **__: object) -> list[LeaseRecord]:
        lease = dataclasses.replace(lease_of(7, 7, "n1"), segment=None)
        assert (lease.generation, lease.state) == (GENERATION, LeaseState.READY)
        told = tuple("n1" for ack in self.acknowledged if ack.clean)
        return [LeaseRecord(lease, 0.0, 0.0, told[:1], taken=("n1",))]


@pytest.fixture
def node(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(layout)
    find = audit.audit

    def of_files(*arguments: object) -> list[NodeFinding]:
        return [one for one in find(*arguments) if one.kind in FILES_ONLY]  # type: ignore[arg-type]

    def silent(*_: object, **__: object) -> None:
        raise FabricError("vhpcd does not answer")

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(ControllerClient, "lease", silent)
    monkeypatch.setattr(ControllerClient, "look", silent)
    monkeypatch.setattr(ControllerClient, "report_usage", lambda *_: False)
    monkeypatch.setattr(ControllerClient, "acknowledge", silent)
    monkeypatch.setattr(ControllerClient, "report_and_acknowledge", silent)
    monkeypatch.setattr(ControllerClient, "leases", made.leases)
    monkeypatch.setattr(audit, "audit", of_files)
    files_only = [one for one in registry.RESOURCES if one not in registry.NETWORKS]
    monkeypatch.setattr(registry, "RESOURCES", files_only)
    monkeypatch.setattr(teardown, "CONNECT_S", 0.01)  # no shim is there
    monkeypatch.setattr(steps, "running", lambda: {7: frozenset({"extern", "batch"})})
    return made


def reconciled(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reconcile while vhpcd answers; returns the kinds of what was repaired."""
    with monkeypatch.context() as patch:
        patch.setattr(ControllerClient, "acknowledge", lambda _, ack: node.acknowledged.append(ack))
        patch.setattr(ControllerClient, "report_and_acknowledge", node.reported)
        results = run.reconcile(node.layout.config, "n1", check=False)
    assert all(result.repaired for result in results), results
    return [result.kind.value for result in results]


@pytest.mark.promise("clean.epilog")
@needs_root
@pytest.mark.long
def test_an_epilog_killed_at_any_step_is_finished(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.take()
    begun = 0
    for step in kills(node.epilog):
        if not joblock.has_tombstone(node.layout, GENERATION):
            assert reconciled(node, monkeypatch) == [], f"killed at step {step}, before the end has begun"
            assert "journals" in node.left()
            continue
        begun += 1
        found = reconciled(node, monkeypatch)
        assert node.left() == {}, f"killed at step {step}; reconcile repaired {found}"
        assert [ack.generation for ack in node.acknowledged] == [GENERATION], f"killed at step {step}"
        node.take()
    assert begun > 2 * 7, "a release and its note for each resource"
    assert reconciled(node, monkeypatch) == ["outbox"], "the Epilog that lived has left its acknowledgement"
    assert node.left() == {}
    assert reconciled(node, monkeypatch) == []


@pytest.mark.promise("clean.epilog")
@needs_root
def test_a_running_epilog_is_left_to_finish(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.take()
    before_it = node.left()
    joblock.write_tombstone(node.layout, GENERATION)
    with joblock.held(node.layout, 7, timeout_s=1.0):
        assert reconciled(node, monkeypatch) == []
    assert node.left() == before_it
    assert reconciled(node, monkeypatch) == ["stale-generation", "outbox"]


@pytest.mark.promise("clean.epilog")
@needs_root
def test_an_interrupted_end_needs_no_vhpcd(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.take()
    joblock.write_tombstone(node.layout, GENERATION)

    def silent(*_: object, **__: object) -> None:
        raise FabricError("vhpcd does not answer")

    monkeypatch.setattr(ControllerClient, "leases", silent)
    results = run.reconcile(node.layout.config, "n1", check=False)
    assert [(one.kind.value, one.repaired) for one in results] == [
        ("controller", False),
        ("stale-generation", True),
        ("outbox", False),
    ]
    assert list(node.left()) == ["acknowledgements"]


@pytest.mark.promise("clean.epilog")
@needs_root
def test_the_next_job_takes_resources_of_a_killed_epilog(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Prolog, although Slurm still runs the job's steps here."""
    node.take()
    monkeypatch.setattr(ended_jobs, "has_ended", lambda *_: False)
    reserved = [type("Reservation", (), {"generation": str(GENERATION)})]
    monkeypatch.setattr(reservations, "live", lambda *_, **__: reserved)
    port = slurm.commands(Config())
    assert not ended_jobs.clear(node.layout, port, "n1", excluding=Generation(8, 0, "00000008"))
    joblock.write_tombstone(node.layout, GENERATION)
    assert ended_jobs.clear(node.layout, port, "n1", excluding=Generation(8, 0, "00000008"))
    assert list(node.left()) == ["acknowledgements"]
