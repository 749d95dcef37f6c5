# SPDX-License-Identifier: Apache-2.0
"""The keeper as a process: it survives its starter, obeys SIGTERM, and is replaced when it was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from pace import until
from vhpc_slurm.config import Config
from vhpc_slurm.model import Generation, NodePlan
from vhpc_slurm.node.boot import keeper
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.process import ProcessRef
from vhpc_slurm.node.resource.process import Process, ProcessData
from vhpc_slurm.node.store import joblock
from vhpc_slurm.node.store.journal import Journal, read_entries
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import attendants
from vhpc_slurm.reconcile.finding import RepairResult, repair

GENERATION = Generation(42, 0, "0123abcd")
DRIVER = Path(__file__).parents[1] / "support/keeper_process.py"


@dataclass
class Node:
    """A node with the journal of a job, and its keeper."""

    folder: Path
    layout: Layout
    journal: Journal

    def start(self) -> None:
        keeper.start(self.layout, self.journal, NodePlan(GENERATION, "n1", (), 4096, 512))

    def order(self, word: str) -> None:
        new = self.folder / "orders.new"
        new.write_text(word)
        new.rename(self.folder / "orders")

    def orders(self, word: str, event: str, count: int = 1) -> None:
        self.order(word)
        self.sees(event, count)

    def sees(self, event: str, count: int = 1) -> None:
        until(lambda: self.events.count(event) >= count, f"{count} times {event!r} in {self.events}")

    @property
    def events(self) -> list[str]:
        path = self.folder / "events"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def done(self) -> list[str]:
        """Calls of the guests, in their order."""
        return [event for event in self.events if not event.startswith(("asked", "found"))]

    @property
    def ref(self) -> ProcessRef:
        entry = keeper.KEEPER.entry_of(read_entries(self.layout.journals, GENERATION))
        assert entry is not None
        ref = entry.read(ProcessData).ref
        assert ref is not None
        return ref

    def works(self) -> bool:
        return keeper.KEEPER.works(self.layout, GENERATION)

    def ends(self) -> None:
        assert process.wait_gone(self.ref, 30)

    def send(self, number: int) -> None:
        os.kill(self.ref.pid, number)

    def reconcile(self) -> list[RepairResult]:
        return [repair(found, check=False) for found in attendants.findings(self.layout, "n1")]

    @property
    def log(self) -> str:
        return (self.layout.log / "hooks.log").read_text()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    raw: dict[str, dict[str, object]] = {
        "paths": {name: str(tmp_path / name) for name in ("state", "run", "log")},
        "checkpoint": {"folder": str(tmp_path / "checkpoints"), "hold_timeout_s": 5},
    }
    config = tmp_path / "vhpc.toml"
    config.write_text("\n".join(f"[{name}]\n" + lines(part) for name, part in raw.items()))
    monkeypatch.setenv("VHPC_CONFIG", str(config))
    monkeypatch.setattr(keeper.KEEPER, "program", (str(DRIVER), str(tmp_path)))
    layout = Layout(msgspec.convert(raw, Config))
    layout.job(42).mkdir(parents=True)
    made = Node(tmp_path, layout, Journal(layout.journals, GENERATION))
    made.order("wait")
    yield made
    made.journal.close()
    for ref, _ in process.marked(str(GENERATION)):
        process.end(ref)


def lines(part: dict[str, object]) -> str:
    return "\n".join(f"{key} = {value!r}" for key, value in part.items())


def test_a_keeper_shares_no_session_and_no_file_with_prolog(node: Node) -> None:
    node.start()
    node.sees("asked -")
    pid = node.ref.pid
    assert os.getsid(pid) == pid
    open_files = {path.name: str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    assert open_files["0"] == "/dev/null"
    assert open_files["1"] == open_files["2"] == str(node.layout.job(42) / "keeper.log")
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    assert (node.ref, str(GENERATION)) in set(process.marked())
    assert "found 42.0.0123abcd" not in node.events, "the guests are found when they are to be held"


def test_epilog_ends_a_keeper_by_its_journal(node: Node) -> None:
    node.start()
    node.sees("asked -")
    (entry,) = node.journal.held()
    assert entry.read(ProcessData).role == "keeper"
    joblock.write_tombstone(node.layout, GENERATION)
    node.orders("hold", "hold")
    Process().release(node.layout, GENERATION, entry)
    assert not process.alive(node.ref)
    assert node.done == ["hold"], "the Epilog ends the guests, and no checkpoint that is valid continues"


@pytest.mark.parametrize("word", ["hold", "save"])
def test_sigterm_without_epilog_lets_guests_continue(node: Node, word: str) -> None:
    node.start()
    node.orders("hold", "hold")
    if word == "save":
        node.orders("save", "asked saved")
    node.send(signal.SIGTERM)
    node.ends()
    assert node.done[-1] == "go_on"


@pytest.mark.parametrize("step", ["hold", "go_on"])
def test_sigterm_while_guests_are_told_comes_after_it(node: Node, step: str) -> None:
    (node.folder / step).touch()
    node.start()
    node.orders("hold", "hold")
    if step == "go_on":
        node.orders("continue", "go_on")
    node.send(signal.SIGTERM)
    assert not process.wait_gone(node.ref, 0.5)
    (node.folder / step).unlink()
    node.ends()
    assert node.done == ["hold", "go_on"]


def test_a_save_that_hangs_stops_neither_sigterm_nor_orders(node: Node) -> None:
    (node.folder / "save").touch()
    node.start()
    node.orders("hold", "hold")
    node.orders("save", "save 5")
    ref = node.ref
    node.orders("continue", "go_on")
    assert process.alive(ref), "the same process executes the program again"
    until(node.works, "the keeper works again")
    node.orders("hold", "hold", 2)
    node.orders("save", "save 5", 2)
    node.send(signal.SIGTERM)
    node.ends()
    assert node.done[-2:] == ["save 5", "go_on"]
    assert (ref, str(GENERATION)) not in set(process.marked())


def test_a_killed_keeper_is_replaced_and_guests_continue(node: Node) -> None:
    node.start()
    node.orders("hold", "asked held")
    killed = node.ref
    assert node.reconcile() == []
    node.send(signal.SIGKILL)
    node.ends()
    node.order("wait")
    (result,) = node.reconcile()
    assert (result.kind, result.repaired, result.error) == (Kind.LOST_KEEPER, True, "")
    node.sees("go_on")
    assert node.ref != killed
    assert node.reconcile() == []
    node.orders("hold", "hold", 2)
    assert node.done == ["hold", "go_on", "hold"]


def test_a_new_keeper_ends_guests_that_a_checkpoint_ended(node: Node) -> None:
    node.start()
    node.orders("hold", "hold")
    node.orders("save", "asked saved")
    node.send(signal.SIGKILL)
    node.ends()
    node.order("end")
    assert [result.repaired for result in node.reconcile()] == [True]
    node.sees("end")
    node.order("over")
    node.ends()
    assert "go_on" not in node.done


def test_a_keeper_survives_vhpcd_being_away(node: Node) -> None:
    node.order("away")
    node.start()
    node.sees("asked -")
    node.orders("hold", "hold")
    node.order("over")
    node.ends()
    assert node.done == ["hold", "go_on"]
    assert "vhpcd gives no orders: vhpcd does not answer" in node.log
    assert "keeper[" in node.log
    assert "job 42:" in node.log


def test_only_one_keeper_of_a_job_works(node: Node) -> None:
    node.start()
    until(node.works, "the keeper works")
    first = node.ref
    (entry,) = node.journal.held()
    second = keeper.KEEPER.start_again(node.layout, node.journal, entry, "n1")
    assert keeper.KEEPER.lives(node.layout, GENERATION, entry)
    assert process.wait_gone(second, 30)
    assert process.alive(first)
    assert "another one of the job runs" in node.log


def test_jobs_with_a_running_hook_get_no_new_keeper(node: Node) -> None:
    node.start()
    until(node.works, "the keeper works")
    node.send(signal.SIGKILL)
    node.ends()
    with joblock.held(node.layout, 42, timeout_s=5):
        assert node.reconcile() == []
    (found,) = attendants.findings(node.layout, "n1")
    joblock.write_tombstone(node.layout, GENERATION)
    found.repair()
    assert not node.works()
    assert node.reconcile() == []


def test_a_job_without_a_keeper_gets_none(node: Node) -> None:
    Process().announce(node.journal, "g0:shim", "shim")
    assert node.reconcile() == []


def test_a_keeper_that_does_not_start_is_reported(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.start()
    until(node.works, "the keeper works")
    node.send(signal.SIGKILL)
    node.ends()
    monkeypatch.setattr(keeper.KEEPER, "program", ("-c", "raise SystemExit('no such module')"))
    (result,) = node.reconcile()
    assert not result.repaired
    assert not result.drains
    assert "the keeper of job 42 does not start: no such module" in result.error


def test_the_real_program_asks_a_vhpcd_that_is_away(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("VHPC_CONFIG", str(node.folder / "vhpc.toml"))
    node.start()
    until(node.works, "the keeper works")
    assert process.alive(node.ref)
    node.send(signal.SIGTERM)
    node.ends()
    assert (node.layout.job(42) / "keeper.log").read_text() == ""


def test_without_its_run_folder_a_keeper_ends(node: Node) -> None:
    node.layout.job(42).rename(node.folder / "elsewhere")
    node.start()
    assert node.journal.held() == [], "a job without a keeper runs, and cannot be saved"
