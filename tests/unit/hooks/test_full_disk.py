# SPDX-License-Identifier: Apache-2.0
"""A node whose state or run folder is full: what starts is requeued, what ends is released, no drain.

The folders are small file systems, which real processes fill.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from boot_rig import GENERATION, boot_layout
from prolog_rig import Node, prolog_node
from small_fs import NO_SPACE, PAGE, fill, mounted
from stepd import needs_root

from vhpc_slurm import files
from vhpc_slurm.config import Config, Paths
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError
from vhpc_slurm.hooks import common, epilog
from vhpc_slurm.model import Generation
from vhpc_slurm.node import teardown
from vhpc_slurm.node.store import joblock, journal, outbox
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import audit

layout, node = boot_layout, prolog_node
pytestmark = needs_root


@pytest.fixture
def full_state(layout: Layout) -> Iterator[Path]:
    with mounted(layout.state) as folder:
        yield folder


def announce(book: Journal, count: int) -> None:
    for number in range(count):
        book.acquire("uid", f"uid:{number}", uid=number)


# --- the journal ------------------------------------------------------------------------


@pytest.mark.promise("disk.full-state")
@pytest.mark.parametrize("pages", range(3))
def test_a_journal_on_a_full_disk_has_whole_lines_only(full_state: Path, pages: int) -> None:
    """A page that is left takes a part of a line before there is an error."""
    book = Journal(full_state / "journal", GENERATION)
    others = fill(full_state, pages)
    with pytest.raises(FabricError, match=f"no room for the journal .*: {NO_SPACE}"):
        announce(book, 1000)
    held = [entry.key for entry in book.held()]
    assert bool(held) == bool(pages)
    assert all(json.loads(line) for line in book.path.read_text().splitlines())
    others.unlink()
    book.acquire("uid", "uid:later", uid=9)
    book.close()
    entries = journal.read_entries(full_state / "journal", GENERATION)
    assert [entry.key for entry in entries] == [*reversed(held), "uid:later"]


@pytest.mark.promise("disk.full-state")
def test_a_release_that_cannot_be_noted_is_one_all_the_same(
    full_state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = Journal(full_state / "journal", GENERATION)
    announce(book, 100)  # whose releases need more than what is left of a page
    fill(full_state)
    with caplog.at_level(logging.WARNING, "vhpc"):
        for entry in book.held():
            book.released(entry.key)
    assert "is not noted: no room for the journal" in caplog.text
    assert book.held() == []
    on_disk = journal.read_entries(full_state / "journal", GENERATION)
    assert on_disk, "until it is removed, others take these for held"
    book.remove()
    assert not book.path.exists()


# --- Prolog and Epilog ------------------------------------------------------------------


def again(node: Node, monkeypatch: pytest.MonkeyPatch) -> Generation:
    """The same job is started once more, as after a requeue."""
    later = Generation(42, 1, "89abcdef")
    node.lease = dataclasses.replace(
        node.lease, generation=later, request=dataclasses.replace(node.lease.request, restart=1)
    )
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    return later


@pytest.mark.promise("disk.full-state")
@pytest.mark.parametrize("pages", range(7))
@pytest.mark.parametrize("which", ["state", "run"])
def test_a_job_on_a_full_disk_is_requeued_and_its_node_stays(
    node: Node, layout: Layout, monkeypatch: pytest.MonkeyPatch, which: str, pages: int
) -> None:
    """However much is left: the Prolog ends well or requeues the job, and the Epilog releases everything."""
    with mounted(getattr(layout, which)) as folder:
        layout.journals.mkdir(parents=True, exist_ok=True)
        others = fill(folder, pages)
        assert node.run() == 0
        assert node.requeued in ([], [42])
        if not node.requeued:
            assert node.state["status"] == "ready"
        assert epilog.run(layout.config) == 0
        assert node.drained == []
        assert list(journal.generations(layout.journals)) == []
        assert not layout.job(42).exists()
        assert {(ack.generation, ack.clean) for ack in node.acknowledged} == {(GENERATION, True)}
        others.unlink()
        later = again(node, monkeypatch)
        node.requeued.clear()
        assert node.run() == 0
        assert (node.state["status"], node.state["generation"]) == ("ready", str(later))
        assert (node.requeued, node.drained) == ([], [])
        assert epilog.run(layout.config) == 0
        assert list(journal.generations(layout.journals)) == []


def test_a_job_boots_with_some_free_pages_and_not_without(node: Node, layout: Layout) -> None:
    """Or the test above would show little."""
    with mounted(layout.state) as folder:
        layout.journals.mkdir(parents=True)
        fill(folder)
        assert node.run() == 0
        assert node.requeued == [42]


def test_a_job_that_fills_the_disk_while_it_boots_is_requeued(
    node: Node, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(layout.run) as folder:
        layout.journals.mkdir(parents=True, exist_ok=True)

        def full(*_: object) -> None:
            fill(folder)
            (folder / "more").write_bytes(bytes(PAGE))

        monkeypatch.setattr("vhpc_slurm.hooks.bringup._reserve", full)
        assert node.run() == 0
        assert (node.requeued, node.drained, node.held) == ([42], [], [])


@pytest.mark.promise("disk.full-state")
def test_a_job_that_may_not_be_requeued_still_leaves_nothing(node: Node, layout: Layout) -> None:
    node.may_requeue = False
    with mounted(layout.run) as folder:
        layout.journals.mkdir(parents=True, exist_ok=True)
        fill(folder, 1)  # for the lock
        assert node.run() == 0
        assert node.drained == []
        assert set(node.held) <= {"rundir"}
        assert epilog.run(layout.config) == 0
        assert list(journal.generations(layout.journals)) == []


# --- acknowledgements -------------------------------------------------------------------


@pytest.mark.promise("disk.full-state")
def test_a_report_without_space_is_sent_or_made_again(
    node: Node, layout: Layout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clear = teardown.clear

    def silent(*_: object) -> None:
        raise FabricError("vhpcd does not answer")

    def clear_and_fill(*which: Any) -> None:
        clear(*which)
        fill(layout.state)  # others take what the journal had

    with mounted(layout.state) as folder:
        layout.journals.mkdir(parents=True)
        assert node.run() == 0
        others = fill(folder)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "vhpc"):
            patch.setattr(ControllerClient, "acknowledge", silent)
            patch.setattr(teardown, "clear", clear_and_fill)
            assert epilog.run(layout.config) == 0
        assert node.drained == []
        assert f"no room for the acknowledgement of {GENERATION}" in caplog.text
        assert outbox.pending(layout.outbox) == []
        (missing,) = audit.unacknowledged(layout, "n1", [GENERATION])
        missing.repair()
        assert outbox.pending(layout.outbox) == [], "no room yet, and no error"
        others.unlink()
        (missing,) = audit.unacknowledged(layout, "n1", [GENERATION])
        missing.repair()
        assert [path.stem for path in outbox.pending(layout.outbox)] == [str(GENERATION)]


def test_a_file_that_cannot_be_replaced_leaves_no_part(full_state: Path) -> None:
    (full_state / "file").write_bytes(b"old")
    fill(full_state, 2)
    with pytest.raises(OSError, match=NO_SPACE):
        files.replace(full_state / "file", bytes(3 * PAGE))
    assert (full_state / "file").read_bytes() == b"old"
    assert {path.name for path in full_state.iterdir()} == {"file", "of-others"}


# --- the log ----------------------------------------------------------------------------


@pytest.mark.promise("disk.full-state")
def test_a_full_log_costs_one_line_on_stderr_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hook(_: Config) -> int:
        common.log.info("clean")
        return 0

    config = Config(paths=Paths(log=str(tmp_path / "log")))
    monkeypatch.setattr(common.log, "handlers", [])
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    with mounted(tmp_path / "log") as folder:
        fill(folder)
        assert common.main("epilog", hook, config) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("job 42: INFO clean")


def test_a_prolog_that_cannot_name_itself_does_not_begin(layout: Layout) -> None:
    """An Epilog could not end it; the Epilog itself needs no name."""
    with mounted(layout.run) as folder:
        fill(folder)
        with pytest.raises(joblock.NoRoomError, match=NO_SPACE), joblock.held(layout, 42, timeout_s=1):
            pass
        with joblock.held(layout, 42, timeout_s=1, end_holder=True):
            assert joblock.busy(layout, 42)
