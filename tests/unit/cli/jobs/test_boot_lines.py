# SPDX-License-Identifier: Apache-2.0
"""How far a job's boot is: what nodes say, what `vhpc ps` shows, and what srun's watcher prints."""

from __future__ import annotations

import os
import pwd
import re
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from controller_lab import HAVE_MUNGED, NOBODY, Munged, allocation, request, stop
from forked_vhpc import Forked, run_json
from lease_records import LEASE, record
from vhpcd_process import Vhpcd, make

from pace import limit
from vhpc_slurm.cli.jobs import bootline
from vhpc_slurm.cli.main import main
from vhpc_slurm.cli.web import overview
from vhpc_slurm.cli.web.gathering import Viewing
from vhpc_slurm.controller.api import progress
from vhpc_slurm.controller.wire_types import ProgressWire
from vhpc_slurm.model import Lease, LeaseState, Stage, Timeline

needs_munged = pytest.mark.skipif(
    not HAVE_MUNGED or os.geteuid() != 0, reason="needs munged (apt install munge), and root to become users"
)
OWNER = pwd.getpwnam("games").pw_uid
WORD = "0123456789abcdef" * 2


@pytest.fixture
def vhpcd(daemon: Munged) -> Iterator[Vhpcd]:
    folder = Path(tempfile.mkdtemp(prefix="vhpcd-"))
    folder.chmod(0o755)
    found = make(folder, daemon)
    (folder / "bin/sacctmgr").write_text("#!/bin/sh\n")
    (folder / "bin/sacctmgr").chmod(0o755)
    try:
        yield found.start()
    finally:
        if found.process is not None:
            stop(found.process)
        shutil.rmtree(folder)


def opened(vhpcd: Vhpcd, **more: Any) -> Lease:
    job = request(42, uid=OWNER, user="games", **more)
    return vhpcd.client.open_generation(job, allocation(memory_mib=4096), WORD)


def ready(vhpcd: Vhpcd, lease: Lease, node: str) -> None:
    vhpcd.client.report_timeline(Timeline(lease.generation, node, (Stage("setup g0", 1.0, 2.0),)))


@needs_munged
def test_ps_shows_the_step_that_a_job_waits_for(vhpcd: Vhpcd) -> None:
    config = vhpcd.folder / "vhpc.toml"
    lease = opened(vhpcd, guests_per_node=2)
    (row,) = run_json(OWNER, config, "ps")
    assert row["booting"] == {"nodes_ready": 0, "doing": []}
    vhpcd.client.look(42, 0, "n1", ("agent g1", 12.0))
    vhpcd.client.look(42, 0, "n2", ("image", 3.0))
    (row,) = run_json(OWNER, config, "ps")
    assert [(one["node"], one["stage"]) for one in row["booting"]["doing"]] == [
        ("n1", "agent g1"),
        ("n2", "image"),
    ]
    assert 12.0 <= row["booting"]["doing"][0]["for_s"] < 60.0
    ready(vhpcd, lease, "n1")
    (row,) = run_json(OWNER, config, "ps")
    assert (row["booting"]["nodes_ready"], len(row["booting"]["doing"])) == (1, 1)
    ready(vhpcd, lease, "n2")
    (row,) = run_json(OWNER, config, "ps")
    assert row["booting"] is None


@pytest.mark.promise("boot.progress")
@needs_munged
def test_a_job_boots_until_all_guests_are_ready(vhpcd: Vhpcd) -> None:
    config = vhpcd.folder / "vhpc.toml"
    lease = opened(vhpcd)

    def shown() -> tuple[str, ...]:
        (row,) = run_json(OWNER, config, "ps")
        code, table, _ = Forked(OWNER, config, "ps").end()
        told, text, _ = Forked(OWNER, config, "report", "42").end()
        assert (code, told) == (0, 0)
        (fact,) = re.findall(r"^state +(\S.*)$", text, re.MULTILINE)
        report = run_json(OWNER, config, "report", "42")
        found = overview.document(Viewing(vhpcd.config, None).overview())
        (job,) = found["jobs"]
        assert (report["booting"] is None) == (row["booting"] is None)
        return (row["state"], table.splitlines()[1].split()[4], report["state"], fact, job["state"])

    far = "0 of 2 guests ready"
    assert shown() == (*["booting"] * 3, f"booting: {far}", "booting")
    ready(vhpcd, lease, "n1")
    assert shown() == (*["booting"] * 3, f"booting: {far.replace('0', '1')}", "booting")
    ready(vhpcd, lease, "n2")
    assert shown() == ("ready",) * 5


@pytest.mark.parametrize("state", LeaseState)
def test_only_a_ready_lease_is_shown_as_booting(state: LeaseState) -> None:
    lease = replace(LEASE, state=state)
    wire = ProgressWire(generation=str(lease.generation), nodes=2, ready=1)
    assert bootline.state(lease, wire) == ("booting" if state is LeaseState.READY else state.value)
    assert bootline.state(lease, None) == state.value


@pytest.mark.promise("attack.boot-word")
@needs_munged
def test_only_a_node_of_the_job_reports_its_progress(vhpcd: Vhpcd) -> None:
    opened(vhpcd)
    vhpcd.client.look(42, 0, "n9", ("agent g0", 12.0))
    _, booting = vhpcd.client.booting()
    assert [one.doing for one in booting.values()] == [()]


class Watcher:
    """`vhpc boot-watch` of a user, whose stderr is a terminal."""

    def __init__(self, vhpcd: Vhpcd, uid: int, pid: int) -> None:
        self.terminal, end = os.openpty()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.dup2(end, 2)
                os.environ["VHPC_CONFIG"] = f"{vhpcd.folder}/vhpc.toml"
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                code = main(["boot-watch", WORD, str(pid)])
            finally:
                os._exit(code)
        os.close(end)

    def lines(self) -> list[tuple[float, str]]:
        """All lines until it ends, with the time at which each came."""
        found: list[tuple[float, str]] = []
        deadline = time.monotonic() + limit(60)
        while True:
            assert select.select([self.terminal], [], [], deadline - time.monotonic())[0], found
            try:
                piece = os.read(self.terminal, 4096)
            except OSError:  # EIO: no process has the terminal any more
                break
            if not piece:
                break
            found += [(time.monotonic(), text) for text in piece.decode().splitlines()]
            if len(found) == 1:
                self.seen()
        os.close(self.terminal)
        _, status = os.waitpid(self.pid, 0)
        assert status == 0
        return found

    def seen(self) -> None:
        """Called at the first line."""


@pytest.fixture
def command() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for the job, as srun does."""
    with subprocess.Popen(["sleep", "120"]) as process:
        yield process
        process.kill()


@pytest.mark.promise("boot.progress")
@needs_munged
def test_a_waiting_command_shows_the_progress_of_guests(
    vhpcd: Vhpcd, command: subprocess.Popen[bytes]
) -> None:
    lease = opened(vhpcd)
    ready(vhpcd, lease, "n1")
    vhpcd.client.look(42, 0, "n2", ("agent g0", 12.0))
    watcher = Watcher(vhpcd, OWNER, command.pid)
    watcher.seen = lambda: ready(vhpcd, lease, "n2")  # type: ignore[method-assign]
    found = watcher.lines()
    assert len(found) == 1
    assert re.fullmatch(r"vhpc: 1 of 2 guests ready, n2: agent for \d+ s", found[0][1])
    assert command.poll() is None


@pytest.mark.promise("attack.boot-word")
@needs_munged
@pytest.mark.parametrize("case", ["another user", "no such word", "ready"])
def test_a_command_that_need_not_wait_prints_nothing(
    vhpcd: Vhpcd, command: subprocess.Popen[bytes], case: str
) -> None:
    lease = opened(vhpcd) if case != "no such word" else None
    if case == "ready" and lease is not None:
        for node in ("n1", "n2"):
            ready(vhpcd, lease, node)
    watcher = Watcher(vhpcd, NOBODY if case == "another user" else OWNER, command.pid)
    if case != "ready":
        time.sleep(5)
        command.kill()  # and it ends with the command
    assert watcher.lines() == []


@needs_munged
def test_the_watcher_is_quiet_without_a_terminal(vhpcd: Vhpcd, command: subprocess.Popen[bytes]) -> None:
    opened(vhpcd)
    assert Forked(OWNER, vhpcd.folder / "vhpc.toml", "boot-watch", WORD, str(command.pid)).end() == (
        0,
        "",
        "",
    )


def test_a_line_has_guests_and_the_slowest_node() -> None:
    wire = ProgressWire(generation="1.0.00000001", nodes=4, ready=3, doing=(("n7", "agent g0", 12.3),))
    assert bootline.line(1, wire) == "3 of 4 guests ready, n7: agent for 12 s"
    assert (
        bootline.line(2, ProgressWire(generation="1.0.00000001", nodes=4, ready=3)) == "6 of 8 guests ready"
    )
    assert bootline.line(1, None) == ""
    hostile = ProgressWire(generation="1.0.00000001", nodes=1, ready=0, doing=(("n1", "\x1b[2J", 1.0),))
    assert bootline.line(1, hostile) == "0 of 1 guests ready, n1: ?[2J for 1 s"


def test_remembered_progress_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "JOBS", 3)
    monkeypatch.setattr(progress, "WAITERS", 3)
    known = progress.Progress(lambda: 100.0)
    for job_id in range(1, 10):
        known.doing(job_id, 0, "n1", "agent", 1.0)
        known.waits(f"{job_id}", job_id)
    assert [known.job_of(f"{job_id}") for job_id in range(5, 10)] == [None, None, 7, 8, 9]
    assert len(known._doing) == 3
    known.over(9)
    assert (9, 0) not in known._doing


def test_a_job_boots_for_an_hour_at_most() -> None:
    one = record()
    known = progress.Progress()
    assert known.of(one, (), one.created + 10) is not None
    assert known.of(one, one.lease.allocation.node_names, one.created + 10) is None
    assert known.of(one, (), one.created + 3601) is None
