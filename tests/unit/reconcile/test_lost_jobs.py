# SPDX-License-Identifier: Apache-2.0
"""Batch scripts that do not run although their guests are ready: told from all that only look so."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from controller_lab import identity, request
from stepd import needs_root, stepd

from vhpc_slurm.config import Config
from vhpc_slurm.controller.leases import rules
from vhpc_slurm.model import (
    Allocation,
    Generation,
    HetPlace,
    LeaseRecord,
    NetworkIdentity,
    NodeAllocation,
)
from vhpc_slurm.node.host import steps
from vhpc_slurm.node.store import joblock, statefile
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import ended_jobs, lost_jobs
from vhpc_slurm.slurm.port import SlurmJob
from vhpc_slurm.slurm.scontrol import Scontrol

# Tests that start or count slurmstepds see each other's: one worker runs them all.
pytestmark = pytest.mark.xdist_group("slurmstepd")

DATA = Path(__file__).parents[2] / "data/scontrol/24.11"
JOB = 1  # the one of single.txt, whose script Slurm has running on n1
GENERATION = Generation(JOB, 0, "0123abcd")
SCONTROL = """#!/bin/sh
here=$(dirname "$0")
case "$1" in
-o) cat "$here/job";;
*) echo "$*" >> "$here/calls"
   if [ -e "$here/$1.refused" ]; then cat "$here/$1.refused" >&2; exit 1; fi;;
esac
"""
# what scontrol 24.11 says when it requeues a job of srun, and one of sbatch --no-requeue
REFUSALS = (
    "Only batch jobs are accepted or processed for job 1",
    "Requested operation is presently disabled for job 1",
)


class Node:
    """A node with one job, whose guests have been ready for some time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.created = time.time()  # of the lease
        paths = {key: str(folder / key) for key in ("state", "run", "log")}
        self.config = msgspec.convert({"paths": paths}, Config)
        for command in ("scontrol", "scancel"):
            (folder / command).write_text(SCONTROL.replace('"$*"', f'"{command} $*"'))
            (folder / command).chmod(0o755)
        (folder / "squeue").write_text(f"#!/bin/sh\necho {JOB} {JOB} N/A N/A N/A\n")
        (folder / "squeue").chmod(0o755)
        self.slurm = Scontrol(str(folder))
        self.show("single.txt")
        self.path = Layout(self.config).state_file(JOB)
        self.path.parent.mkdir(parents=True)
        self.ready()

    def show(self, name: str, **changes: str) -> None:
        text = (DATA / name).read_text()
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        (self.folder / "job").write_text(text)

    def ready(self, status: str = "ready", age: float = 100, generation: Generation = GENERATION) -> None:
        fields = {"generation": str(generation), "status": status, "since": f"{statefile.uptime() - age:.0f}"}
        statefile.write_state(self.path, fields, os.getuid())

    def record(self, *nodes: str) -> LeaseRecord:
        parts = Allocation(tuple(NodeAllocation(node, (0, 1), 512) for node in nodes or ("n1",)))
        reserved = rules.reserve(GENERATION, request(JOB), parts, identity(), NetworkIdentity(), self.created)
        return replace(reserved, lease=replace(reserved.lease, allocation=parts))

    def lost(self, *nodes: str, node: str = "n1") -> list[str]:
        found = list(
            lost_jobs.findings(
                Layout(self.config), node, [self.record(*nodes)], slurm=self.slurm, pause=self.pauses
            )
        )
        for finding in found:
            finding.repair()
        return [finding.what for finding in found]

    def later(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        """The node has run for longer."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME) + seconds
        monkeypatch.setattr(lost_jobs, "uptime", lambda: now)

    def pauses(self, _: float) -> None:
        """Changes between the two looks."""

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def extern() -> Iterator[None]:
    with stepd(JOB, "extern"):
        yield


@pytest.mark.promise("attack.stepd")
@needs_root
def test_steps_are_recognized_by_their_slurmstepds_titles(tmp_path: Path) -> None:
    program = "/usr/sbin/slurmstepd"
    processes = [
        ("slurmstepd: [7.extern]", program, 0),
        ("slurmstepd: [7.batch]", f"{program} (deleted)", 0),
        ("slurmstepd: [8+1.0]", "/usr/sbin/slurmstepd-wlm", 0),  # as Debian calls it
        ("/usr/sbin/slurmd -D", "/usr/sbin/slurmd", 0),
        ("sh -c slurmstepd: [9.batch]", "/bin/sh", 0),
        ("slurmstepd: [10.extern]", "/usr/bin/sudo", 0),  # a user has named it so
        ("slurmstepd: [11.extern]", program, 2001),
    ]
    for pid, (title, program, uid) in enumerate(processes, 100):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_text(f"{title}\0")
        (tmp_path / str(pid) / "exe").symlink_to(program)
        os.chown(tmp_path / str(pid), uid, uid)
    (tmp_path / "1").mkdir()  # a process that has just ended
    assert steps.running(tmp_path) == {7: {"extern", "batch"}, 8: {"0"}}


@pytest.mark.usefixtures("extern")
@pytest.mark.parametrize("status", ["ready", "failed"])
def test_a_script_that_does_not_run_has_its_job_requeued(node: Node, status: str) -> None:
    node.ready(status)
    assert node.lost() == ["job 1: its guests are ready but its batch script does not run on n1"]
    assert node.calls == ["scontrol requeue 1"]


@pytest.mark.usefixtures("extern")
@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("commented", [True, False])
def test_a_job_that_cannot_be_requeued_is_ended_and_says_why(
    node: Node, refusal: str, commented: bool
) -> None:
    (node.folder / "requeue.refused").write_text(refusal)
    if not commented:
        (node.folder / "update.refused").write_text("Access/permission denied for job 1")
    node.lost()
    assert node.calls == [
        "scontrol requeue 1",
        "scontrol update jobid=1 AdminComment=vhpc: its guests are ready but its batch script does not run "
        "on n1; it cannot be requeued",
        "scancel 1",
    ]


def test_without_the_step_of_its_allocation_nothing_is_known(node: Node) -> None:
    assert node.lost() == []


@pytest.mark.usefixtures("extern")
@pytest.mark.parametrize("step", ["batch", "0", "interactive"])
def test_a_job_with_a_step_is_not_lost(node: Node, step: str) -> None:
    with stepd(JOB, step):
        assert node.lost() == []


@pytest.mark.usefixtures("extern")
def test_a_script_about_to_start_is_not_lost(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as late:
        monkeypatch.setattr(node, "pauses", lambda _: late.enter_context(stepd(JOB, "batch")))
        assert node.lost() == []


@pytest.mark.usefixtures("extern")
def test_guests_that_are_just_ready_are_not_lost(node: Node) -> None:
    node.ready(age=30)
    assert node.lost() == []
    node.ready("booting")
    assert node.lost() == []
    node.ready(generation=Generation(JOB, 0, "00000000"))
    assert node.lost() == []
    node.path.unlink()
    assert node.lost() == []


def rebooted(node: Node) -> None:
    """The journal is on disk, the run folder was not."""
    node.path.unlink()
    node.path.parent.rmdir()
    journal = Journal(Layout(node.config).journals, GENERATION)
    journal.acquire("rundir", "rundir", path=str(node.path.parent))
    journal.close()


@pytest.mark.parametrize("reason", ["None", "Prolog"])
def test_a_job_whose_node_was_rebooted_is_requeued(node: Node, reason: str) -> None:
    rebooted(node)
    node.show("single.txt", **{"Reason=None": f"Reason={reason}"})
    assert node.lost() == ["job 1: n1 was rebooted while it ran"]
    assert node.calls == ["scontrol requeue 1"]


def test_a_reboot_of_another_node_counts_while_the_job_boots(node: Node) -> None:
    rebooted(node)
    node.show("single.txt", **{"BatchHost=n1": "BatchHost=n2"})
    assert node.lost("n2", "n1") == []
    node.show("single.txt", **{"BatchHost=n1": "BatchHost=n2", "Reason=None": "Reason=Prolog"})
    assert node.lost("n2", "n1") == ["job 1: n1 was rebooted while it ran"]


def test_a_reboot_is_a_journal_without_run_folder_or_step(node: Node) -> None:
    rebooted(node)
    with stepd(JOB, "extern"):
        assert node.lost() == []
    layout = Layout(node.config)
    with joblock.held(layout, JOB, timeout_s=1.0):
        assert node.lost() == []
    journal = Journal(layout.journals, GENERATION)
    journal.released("rundir")
    journal.remove()
    assert node.lost() == []


@pytest.mark.promise("attack.reconcile-name")
@pytest.mark.usefixtures("extern")
def test_a_job_name_like_slurm_fields_stops_no_reconciliation(node: Node) -> None:
    """Users may rename their jobs while they run."""
    name = re.search(r"JobName=\S+", (DATA / "single.txt").read_text())
    assert name is not None
    node.show("single.txt", **{name[0]: f"{name[0]} UserId=root(0) MinCPUsNode=1"})
    assert node.lost() == []
    assert node.calls == []
    assert not ended_jobs.has_ended(node.slurm, JOB)


@pytest.mark.usefixtures("extern")
def test_only_the_node_of_the_script_is_looked_at(node: Node) -> None:
    assert node.lost("n1", "n2", node="n2") == []
    assert node.lost("n2", "n1") == []
    node.show("single.txt", **{"BatchHost=n1": "BatchHost=n2"})
    assert node.lost() == []


@pytest.mark.usefixtures("extern")
@pytest.mark.parametrize("offset", [0, 1])
def test_a_component_waits_for_the_script_of_the_first(
    node: Node, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    """That script starts when the nodes of all components are ready."""
    place, leader = HetPlace(JOB - offset, offset, 2), node.slurm.load(JOB)
    states = {JOB: ("RUNNING", "None")}

    def load(job_id: int) -> SlurmJob:
        state, reason = states[job_id]
        host = "n1" if job_id == place.leader else ""
        return replace(leader, job_id=job_id, state=state, reason=reason, batch_host=host, het=place)

    monkeypatch.setattr(node.slurm, "load", load)
    other = JOB + 1 - 2 * offset
    for waits in (("CONFIGURING", "None"), ("RUNNING", "Prolog")):
        states[other] = waits
        assert node.lost() == []
    states[other] = ("RUNNING", "None")
    assert bool(node.lost()) == (offset == 0)


@pytest.mark.usefixtures("extern")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("JobState=RUNNING", "JobState=COMPLETING"),
        ("JobState=RUNNING", "JobState=SUSPENDED"),
        ("Reason=None", "Reason=Prolog"),
        ("Restarts=0", "Restarts=1"),
        ("BatchFlag=1", "BatchFlag=0"),
        ("JobId=1 ", "JobId=2 "),
    ],
)
def test_jobs_that_run_no_batch_script_are_not_lost(node: Node, old: str, new: str) -> None:
    node.show("single.txt", **{old: new})
    assert node.lost() == []
    assert node.calls == []
