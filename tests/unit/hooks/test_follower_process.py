# SPDX-License-Identifier: Apache-2.0
"""The follower as a process: it notices ends of guests, obeys SIGTERM, and is replaced when it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from cluster_lab import member_lease
from stepd import needs_root

from pace import limit, until
from vhpc_slurm.config import Config
from vhpc_slurm.node.boot import follower
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.process import ProcessRef
from vhpc_slurm.node.resource.domain import DomainData
from vhpc_slurm.node.resource.process import Process, ProcessData
from vhpc_slurm.node.store import joblock, membership
from vhpc_slurm.node.store.journal import Journal, read_entries
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import attendants
from vhpc_slurm.reconcile.finding import RepairResult, repair

LEASE = member_lease(42, 5042, "n1", "n2", first=4, each=2)
GENERATION = LEASE.generation
DRIVER = Path(__file__).parents[1] / "support/follower_process.py"
UIDS = (991_101, 991_102)
pytestmark = needs_root


@dataclass
class Node:
    """The second node of a job, with the processes of two guests, and its follower."""

    folder: Path
    layout: Layout
    journal: Journal
    qemus: list[subprocess.Popen[bytes]] = field(default_factory=list)
    shims: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def boot(self) -> None:
        for index, uid in enumerate(UIDS):
            name = f"vhpc-42-0-{GENERATION.nonce}-g{index}"
            self.journal.announce("domain", f"domain:{name}", DomainData(name, uid))
            key = Process().announce(self.journal, f"g{index}:shim", "vhpc-shim")
            for found in (self.shims, self.qemus):
                found.append(subprocess.Popen(["sleep", "600"], user=uid))
            pid = self.shims[-1].pid
            Process().note(self.journal, key, ProcessRef(pid, process.start_time(pid) or 0))

    def start(self) -> None:
        follower.start(self.layout, self.journal, LEASE, "n2")

    def says(self, version: str) -> None:
        new = self.folder / "version.new"
        new.write_text(version)
        new.rename(self.folder / "version")

    def sees(self, event: str) -> float:
        until(lambda: event in self.events, f"{event!r} in {self.events}")
        return self.events[event]

    @property
    def events(self) -> dict[str, float]:
        """When each event happened first."""
        path = self.folder / "events"
        found: dict[str, float] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            at, _, event = line.partition(" ")
            found.setdefault(event, float(at))
        return found

    @property
    def ref(self) -> ProcessRef:
        entry = follower.FOLLOWER.entry_of(read_entries(self.layout.journals, GENERATION))
        assert entry is not None
        ref = entry.read(ProcessData).ref
        assert ref is not None
        return ref

    def ends(self) -> None:
        assert process.wait_gone(self.ref, 30)

    def reconcile(self) -> list[RepairResult]:
        return [repair(found, check=False) for found in attendants.findings(self.layout, "n2")]

    @property
    def log(self) -> str:
        return (self.layout.log / "hooks.log").read_text()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    paths = {name: str(tmp_path / name) for name in ("state", "run", "log")}
    (tmp_path / "log").mkdir()
    config = tmp_path / "vhpc.toml"
    config.write_text("\n".join(["[paths]", *(f"{key} = {value!r}" for key, value in paths.items())]))
    monkeypatch.setenv("VHPC_CONFIG", str(config))
    monkeypatch.setattr(follower.FOLLOWER, "program", (str(DRIVER), str(tmp_path)))
    layout = Layout(msgspec.convert({"paths": paths}, Config))
    for index in range(2):
        layout.guest(42, index).mkdir(parents=True)
    made = Node(tmp_path, layout, Journal(layout.journals, GENERATION))
    made.says("5")
    made.boot()
    yield made
    made.journal.close()
    for ref, _ in process.marked(str(GENERATION)):
        process.end(ref)
    for one in (*made.qemus, *made.shims):
        one.kill()
        one.wait()


def test_the_job_itself_is_known_before_the_first_answer(node: Node) -> None:
    node.says("away")
    node.start()
    node.sees("asked 0 ()")
    known = membership.read(node.layout, 42)
    assert known is not None
    assert (known.name, known.version, known.others) == ("mesh", 0, ())
    assert (known.own.generation, known.own.segment) == (GENERATION, LEASE.segment)
    assert known.own.parts[0].nodes == ("n1", "n2")


def test_the_end_of_a_guest_is_reported_at_once(node: Node) -> None:
    node.start()
    node.sees("asked 5 ()")
    node.shims[0].kill()
    began = time.monotonic()
    node.qemus[1].kill()
    node.qemus[1].wait()
    reported = node.sees("asked 5 (3,)")
    assert reported - began < limit(0.2)
    node.qemus[0].kill()
    node.qemus[0].wait()
    node.sees("asked 5 (2, 3)")
    assert "guest n2-g1 has ended" in node.log


def test_a_new_follower_reports_guests_that_ended_before(node: Node) -> None:
    node.qemus[0].kill()
    node.qemus[0].wait()
    node.start()
    node.sees("asked 0 (2,)")


def test_epilog_ends_a_follower_after_its_last_report(node: Node) -> None:
    node.start()
    node.sees("asked 5 ()")
    (entry, *_) = node.journal.held()
    assert entry.read(ProcessData).role == "follower"
    joblock.write_tombstone(node.layout, GENERATION)
    Process().release(node.layout, GENERATION, entry)
    assert not process.alive(node.ref)
    assert "asked 5 (2, 3)" in node.events


def test_a_stray_sigterm_reports_no_guest(node: Node) -> None:
    node.start()
    node.sees("asked 5 ()")
    os.kill(node.ref.pid, signal.SIGTERM)
    node.ends()
    assert "asked 5 (2, 3)" not in node.events
    assert "SIGTERM while the job runs" in node.log


def test_a_killed_follower_is_replaced(node: Node) -> None:
    node.start()
    node.sees("network 5")
    assert node.reconcile() == []
    os.kill(node.ref.pid, signal.SIGKILL)
    node.ends()
    before = node.ref
    (result,) = node.reconcile()
    assert (result.kind, result.repaired, result.error) == (Kind.LOST_FOLLOWER, True, "")
    assert "job 42 has ended; its guests do not see who joins or leaves" in result.what
    assert node.ref != before
    assert process.alive(node.ref)
    node.says("6")
    node.sees("network 6")
    assert node.reconcile() == []


def test_there_is_one_follower_of_a_job(node: Node) -> None:
    node.start()
    node.sees("asked 5 ()")
    entry = follower.FOLLOWER.entry_of(node.journal.held())
    assert entry is not None
    first = node.ref
    second = follower.FOLLOWER.start_again(node.layout, node.journal, entry, "n2")
    assert process.wait_gone(second, 30)
    assert process.alive(first)
    process.end(first)
    assert "another one of the job runs" in node.log


def test_a_follower_with_nothing_more_to_do_is_not_replaced(node: Node) -> None:
    node.says("over")
    node.start()
    node.ends()
    assert node.reconcile() == []
