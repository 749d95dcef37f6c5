# SPDX-License-Identifier: Apache-2.0
"""Jobs by pyslurm: whatever it does, the answer is right or an error, and it comes in time.

The module pyslurm is the stand-in of ``fake_pyslurm``; the job is one that Slurm
26.05 printed (data/scontrol), so the expected answer is scontrol's.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_pyslurm
import pytest
from pyslurm_rig import GRES, JOB, LAYOUT, NODES, Site, kill, opened, runs

from pace import limit
from vhpc_slurm.slurm.port import NoSuchJobError, SlurmError
from vhpc_slurm.slurm.pyslurm_client import MAX_QUESTIONS, Client, SlowError, UnusableError
from vhpc_slurm.slurm.pyslurm_worker import Questions
from vhpc_slurm.slurm.scontrol import Scontrol


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield from opened(tmp_path, monkeypatch)


# --- right answers ----------------------------------------------------------------------------


def test_a_job_is_the_same_as_by_scontrol(site: Site) -> None:
    assert site.connect().load(2) == site.expected()


def test_threads_of_cores_are_slurms_cpus(site: Site) -> None:
    """Core 4 with two threads is CPU_IDs=8-9; pyslurm says 4."""
    layout = {name: ["4", 1024, GRES] for name in NODES}
    site.change(nodes={"n1": [2, 4, 2], "n2": [2, 4, 2]}, layouts={"2": layout})
    assert site.connect().load(2) == site.expected()


def test_a_name_that_is_not_utf8_is_read_as_by_scontrol(site: Site) -> None:
    site.job(name="caf\xe9", working_directory="/home/\xff")
    site.scontrol_says(("JobName=j.sh", "JobName=caf\xe9"), ("WorkDir=/home/alice", "WorkDir=/home/\xff"))
    job = site.connect().load(2)
    assert (job.name, job.work_dir) == ("caf�", "/home/�")
    assert job == site.expected()


def test_a_job_named_none_keeps_its_name(site: Site) -> None:
    site.job(name="None")
    site.scontrol_says(("JobName=j.sh", "JobName=None"))
    assert site.connect().load(2).name == "None"


def test_a_suspended_jobs_allocation_is_kept(site: Site) -> None:
    site.job(state="SUSPENDED", state_reason="None")
    site.scontrol_says(("JobState=RUNNING Reason=Prolog", "JobState=SUSPENDED Reason=None"))
    assert site.connect().load(2) == site.expected()


@pytest.mark.parametrize("fields", [{"id": 3}, {"heterogeneous_id": 2}, {"array_tasks_waiting": "1-3"}])
def test_records_of_several_jobs_are_left_to_scontrol(site: Site, fields: dict[str, Any]) -> None:
    site.job(**fields, name="wrong")
    assert site.connect().load(2) == site.expected()


def test_a_missing_job_has_its_own_error(site: Site) -> None:
    with pytest.raises(NoSuchJobError):
        site.connect().load(7)


def test_the_list_has_the_same_jobs_as_squeue(site: Site) -> None:
    ended = {
        str(number): JOB | {"id": number, "state": state}
        for number, state in enumerate(("COMPLETED", "CANCELLED", "TIMEOUT"), 10)
    }
    site.change(jobs={"2": JOB, **ended})
    assert site.connect().jobs() == Scontrol(str(site.folder)).jobs()


def test_the_configured_slurm_conf_is_pyslurms_too(site: Site) -> None:
    site.connect(slurm_conf="/srv/slurm.conf").load(2)
    assert (site.package / "slurm.conf").read_text() == "/srv/slurm.conf"


def test_nodes_are_loaded_once_not_for_each_job(site: Site) -> None:
    port = site.connect()
    for _ in range(3):
        port.load(2)
    assert fake_pyslurm.requests(site.package) == [
        *("job", "steps", "partitions", "nodes"),
        *("job", "steps"),
        *("job", "steps"),
    ]
    assert sum("show job" in call for call in site.calls()) == 1  # the first answer was compared


def test_nodes_are_loaded_again_when_they_are_old(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    loads = []

    class Nodes:
        @staticmethod
        def load() -> dict[str, fake_pyslurm.Node]:
            loads.append(now)
            return {"n1": fake_pyslurm.Node("n1", [1, 4, 2])}

    class Api:
        pass

    Api.Nodes = Nodes  # type: ignore[attr-defined]
    questions = Questions(Api, lambda: now)
    for later in (100.0, 159.0, 161.0):
        now = later
        assert questions._node("n1") == [4, 2]
    assert loads == [100.0, 161.0]
    assert questions._node("n2") is None


# --- wrong answers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        ({"layouts": {}}, r"it is RUNNING on n\[1-2\] without CPUs"),
        ({"layouts": {"2": {"n1": LAYOUT["n1"]}}}, "do not match its node list"),
        ({"layouts": {"2": LAYOUT | {"n3": LAYOUT["n1"]}}}, "slurmctld does not show node n3|do not match"),
        ({"layouts": {"2": {name: ["8", 1024, GRES] for name in NODES}}}, "2 CPUs, fewer than the job's 4"),
        ({"layouts": {"2": {name: ["15-16", 1024, GRES] for name in NODES}}}, "the node has 16"),
        ({"layouts": {"2": {name: ["", 1024, GRES] for name in NODES}}}, "its cores on n1 are none"),
        ({"layouts": {"2": {name: ["8-10", 1024, GRES] for name in NODES}}}, "scontrol says"),
        ({"layouts": {"2": {name: ["8-9", 1024, {}] for name in NODES}}}, "scontrol says"),
        ({"layouts": {"2": {name: ["8-9", 2048, GRES] for name in NODES}}}, "scontrol says"),
        ({"layouts": {"2": {name: [",".join(["8"] * 64), 1, GRES] for name in NODES}}}, "truncated"),
        ({"jobs": {"2": JOB | {"user_id": 0}}}, "uid=0, scontrol says 2001"),
        ({"jobs": {"2": JOB | {"user_name": ""}}}, "no user"),
        ({"jobs": {"2": JOB | {"allocated_nodes": "n[1-"}}}, "brackets do not match"),
        ({"nodes": {"n1": [2, 8, 1]}}, "slurmctld does not show node n2"),
    ],
)
def test_a_wrong_answer_is_an_error_with_versions(site: Site, scenario: dict[str, Any], says: str) -> None:
    site.change(**scenario)
    head = r"pyslurm 25\.11\.2 \(built with Slurm 25\.11\.1\) misreads job 2 of Slurm 25\.11\.4: .*"
    with pytest.raises(UnusableError, match=f"{head}(?:{says}).*slurm_adapter"):
        site.connect().load(2)
    assert site.connect(fall_back=True).load(2) == site.expected()


def test_pending_and_ended_jobs_have_no_cpus(site: Site) -> None:
    port = site.connect()
    site.change(layouts={})
    for state, nodes in (("PENDING", ""), ("COMPLETED", "n[1-2]")):
        site.job(state=state, allocated_nodes=nodes)
        assert port.load(2).allocation.nodes == ()


def test_each_kind_of_job_is_compared_once(site: Site) -> None:
    """A job without GRES proves nothing for one that has some."""
    plain = {name: ["8-9", 1024, {}] for name in NODES}
    site.change(layouts={"2": plain})
    site.scontrol_says(("GRES=gpu:h200:2(IDX:0-1),ibvf(CNT:2)", "GRES="))
    port = site.connect()
    port.load(2)
    site.change(layouts={"2": LAYOUT})
    with pytest.raises(UnusableError, match="scontrol says"):
        port.load(2)


# --- a process that fails -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        ({"import": "exit"}, "cannot import pyslurm: .*status 1: fatal: Unable to process configuration"),
        ({"import": "no module"}, "cannot import pyslurm: .*libslurmfull.so: cannot open"),
        ({"behaviour": "exit"}, "pyslurm did not answer: .*status 1: fatal: libslurm says goodbye"),
        ({"behaviour": "raise"}, "cannot read job 2: ValueError: Unable to create hostlist"),
    ],
)
def test_a_process_that_fails_is_an_error(site: Site, scenario: dict[str, Any], says: str) -> None:
    site.change(**scenario)
    port = site.connect()
    with pytest.raises(UnusableError, match=says):
        port.load(2)
    site.change(**dict.fromkeys(scenario, ""))
    assert port.load(2) == site.expected()


def test_printed_text_of_pyslurm_is_not_an_answer(site: Site) -> None:
    site.change(**{"import": "noise"})
    assert site.connect().load(2) == site.expected()


def test_a_refusal_of_slurmctld_is_slurms_error(site: Site) -> None:
    site.change(behaviour="refused")
    with pytest.raises(
        SlurmError, match="did not answer pyslurm: Unable to contact slurm controller"
    ) as info:
        site.connect(fall_back=True).load(2)
    assert not isinstance(info.value, UnusableError)


def test_a_hang_ends_with_the_deadline_and_the_process(site: Site) -> None:
    port = site.connect(timeout_s=0.5)
    port.load(2)
    hung = site.pid()
    site.change(behaviour="hang")
    beats, until = 0, time.monotonic() + 60
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            port.load(2)
        except SlurmError as err:
            caught.append(err)

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive() and time.monotonic() < until:
        beats += 1
        time.sleep(0.01)
    assert not thread.is_alive()
    assert isinstance(caught[0], SlowError)
    assert "no answer within 0.5 s" in caught[0].line()
    # this thread continued: the interpreter's lock is held in the other process; here it could run twice
    assert beats > 5
    assert not runs(hung)
    site.change(behaviour="")
    assert port.load(2) == site.expected()


def test_an_import_that_hangs_ends_with_its_deadline(site: Site) -> None:
    site.change(**{"import": "hang"})
    start_s = limit(0.5)  # Python starts within that, and writes its pid
    with pytest.raises(SlowError, match=re.escape(f"cannot import pyslurm: no answer within {start_s:g} s")):
        site.connect(start_s=start_s).load(2)
    assert not runs(site.pid())


def test_a_killed_process_is_started_again(site: Site) -> None:
    port = site.connect()
    port.load(2)
    kill(site.pid())
    assert port.load(2) == site.expected()


def test_the_process_ends_with_its_parent(site: Site) -> None:
    """Also when pyslurm hangs and the parent was killed: by its own alarm."""
    site.change(behaviour="hang")
    pid = os.fork()
    if pid == 0:
        client = Client(timeout_s=0.4, start_s=1.0)
        client.versions()
        threading.Timer(0.2, lambda: os.kill(os.getpid(), 9)).start()
        client.ask({"ask": "job", "id": 2})
    os.waitpid(pid, 0)
    worker = site.pid()
    until = time.monotonic() + limit(30)
    while runs(worker) and "Z" not in Path(f"/proc/{worker}/stat").read_text().split(")")[-1][:3]:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_process_is_replaced_now_and_then(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_QUESTIONS >= 100
    monkeypatch.setattr("vhpc_slurm.slurm.pyslurm_client.MAX_QUESTIONS", 2)
    port = site.connect()
    pids = []
    for _ in range(4):
        port.load(2)
        pids.append(site.pid())
    assert pids[0] == pids[1] != pids[2] == pids[3]
    assert not runs(pids[0])


def test_several_threads_get_their_own_answers(site: Site) -> None:
    port = site.connect()
    port.load(2)
    site.change(jobs={"2": JOB} | {str(number): JOB | {"id": number} for number in range(3, 9)})
    site.change(layouts={str(number): LAYOUT for number in range(2, 9)})
    found: dict[int, int] = {}

    def ask(number: int) -> None:
        found[number] = port.load(number).job_id

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: number for number in range(2, 9)}
