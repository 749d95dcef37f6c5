# SPDX-License-Identifier: Apache-2.0
"""MPI steps of held guests: the next PMI server, of PMI-1 or PMI-2, is told what the last one was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest_processes import CONTROL_OPERATIONS, WAIT_S
from pmi_rig import join_network
from steps_rig import ServedJob

from pace import until

pytest_plugins = ["guest_rig", "steps_rig"]
pytestmark = CONTROL_OPERATIONS

SRUN = Path(__file__).with_name("pmi_srun.py")
# A task as MPI libraries are: each request waits for its answer.  Arguments: the version, and what to do.
TASK = """
import os, sys, time
version, rank, number = int(sys.argv[1]), int(os.environ["PMI_RANK"]), int(os.environ["PMI_FD"])
other = 1 - rank
stream = os.fdopen(os.dup(number), "rb")
def line(text):
    os.write(number, (text + "\\n").encode())
    return stream.readline().decode().rstrip("\\n")
def message(text):
    os.write(number, f"{len(text):<6}{text}".encode())
    return stream.read(int(stream.read(6))).decode().rstrip(";")
def put(key, value):
    said = line(f"cmd=put kvsname=1.1 key={key} value={value}") if version == 1 \\
        else message(f"cmd=kvs-put;key={key};value={value};")
    assert "rc=0" in said, said
def fence():
    said = line("cmd=barrier_in") if version == 1 else message("cmd=kvs-fence;")
    assert said.startswith("cmd=barrier_out" if version == 1 else "cmd=kvs-fence-response"), said
def get(key):
    said = line(f"cmd=get kvsname=1.1 key={key}") if version == 1 \\
        else message(f"cmd=kvs-get;jobid=1.1;srcid=-1;key={key};")
    return said.rpartition("value=")[2]
def finalize():
    said = line("cmd=finalize") if version == 1 else message("cmd=finalize;thrid=7;")
    assert "finalize" in said, said
def say(*words):
    print(rank, *words, flush=True)
def wait(name):
    while not os.path.exists(name):
        time.sleep(0.02)
said = line(f"cmd=init pmi_version={version} pmi_subversion={2 - version}")
assert said.startswith("cmd=response_to_init rc=0"), said
if version == 2:
    assert "rc=0" in message(f"cmd=fullinit;pmijobid=1.1;pmirank={rank};threaded=FALSE;")
for step in sys.argv[2:]:
    exec(step)
"""
BEGIN = ('put("card%d" % rank, "at%d" % rank)', "fence()", 'say("up", get("card%d" % other))')


@pytest.fixture
def job(programs: Path, tmp_path: Path) -> Iterator[ServedJob]:
    made = ServedJob(programs, tmp_path, SRUN, "pmi-errors", TASK)
    yield made
    made.close()


@pytest.mark.parametrize("version", [1, 2])
def test_values_that_were_put_before_are_there_after(job: ServedJob, version: int) -> None:
    """Also one that was put and not fenced, and values of the runs between."""
    run = job.mpi(
        str(version),
        *BEGIN,
        'put("late%d" % rank, "late%d" % rank)',
        *('say("waits")', 'wait("go")', 'say("again", get("card%d" % other), get("late%d" % other))'),
        *("fence()", 'say("late", get("late%d" % other))', 'put("new%d" % rank, "new%d" % rank)', "fence()"),
        *('say("new")', 'wait("end")', 'say("last", get("new%d" % other), get("card%d" % other))'),
        *("finalize()", "sys.exit(3 + rank)"),
    )
    job.both_say("waits")
    run = job.next_run(run)
    run = job.next_run(run)
    (job.folder / "go").touch()
    job.both_say("new")
    run = job.next_run(run)
    (job.folder / "end").touch()
    assert run.wait(WAIT_S) == 0, job.out("err")
    assert job.errors() == ""
    missing = "cmd=get_result rc=1" if version == 1 else "cmd=kvs-get-response;rc=0;found=FALSE"
    wanted = ["up at{}", "waits", f"again at{{}} {missing}", "late late{}", "new", "last new{} at{}"]
    lines = [f"{rank} {line}".replace("{}", str(1 - rank)) for rank in (0, 1) for line in wanted]
    assert sorted(job.both()) == sorted([*lines, "status 4"])


@pytest.mark.parametrize("version", [1, 2])
def test_no_fence_begins_between_prepare_and_hold(job: ServedJob, version: int) -> None:
    """It would wait for the other task, which has left the step already."""
    run = job.mpi(str(version), *BEGIN, 'wait("go%d" % rank)', "fence()", 'say("done")', "finalize()")
    job.both_say("up", "at{other}")
    job.prepare()
    (job.folder / "go0").touch()
    time.sleep(1)
    job.hold_prepared()
    job.release()
    until(lambda: len(job.sruns()) == job.serial + 1, "the next srun")
    (job.folder / "go1").touch()
    assert run.wait(WAIT_S) == 0
    assert job.errors() == ""
    job.both_say("done")


@pytest.mark.parametrize("version", [1, 2])
def test_an_mpi_step_continues_in_the_same_run(job: ServedJob, version: int) -> None:
    run = job.mpi(
        str(version), *BEGIN, 'wait("go")', "fence()", 'say("done", get("card%d" % other))', "finalize()"
    )
    job.both_say("up", "at{other}")
    for _ in range(3):
        job.hold()
        job.release()
        until(lambda: len(job.sruns()) == job.serial + 1, "the next srun")
    (job.folder / "go").touch()
    assert run.wait(WAIT_S) == 0
    assert job.errors() == ""
    assert [line for line in job.both() if "done" in line] == ["0 done at1", "1 done at0"]
    asked = [line for line in job.out("asked").splitlines() if line.startswith("4 0 ")]
    # one fence for those of all steps, then the program's own, its get and finalize
    assert len([line for line in asked if "barrier_in" in line or "fence" in line]) == 2, asked


@pytest.mark.parametrize("version", [1, 2])
def test_each_guest_of_a_node_stays_a_node_of_the_mapping(job: ServedJob, version: int) -> None:
    for guest in job.guests:
        join_network(guest)
    mapping, node = 'say("map", get("PMI_process_mapping"))', {"VHPC_JOB_GUESTS": "2"}
    run = job.mpi(str(version), mapping, *BEGIN, 'wait("go")', mapping, "finalize()", **node)
    job.both_say("up", "at{other}")
    run = job.next_run(run, **node)
    (job.folder / "go").touch()
    assert run.wait(WAIT_S) == 0
    assert job.errors() == ""
    lines = [line for line in job.both() if "map" in line]
    assert lines == [f"{rank} map (vector,(0,2,1))" for rank in (0, 0, 1, 1)]


@pytest.mark.parametrize("version", [1, 2])
def test_a_task_that_has_ended_takes_part_in_the_fence(job: ServedJob, version: int) -> None:
    rest = 'wait("go"); say("then", get("card%d" % other)); finalize()'
    run = job.mpi(str(version), *BEGIN, f"if rank == 1:\n    {rest}", "sys.exit(7)")
    until(lambda: "1 up at0" in job.both(), "the second task")
    time.sleep(0.5)
    run = job.next_run(run)
    time.sleep(0.5)
    (job.folder / "go").touch()
    assert run.wait(WAIT_S) == 0, job.out("err")
    assert job.errors() == ""
    assert {"1 then ", "status 7"} <= {line.split("cmd=")[0] for line in job.both()}


def test_a_program_that_has_finalized_continues(job: ServedJob) -> None:
    run = job.mpi("1", *BEGIN, "fence()", "finalize()", 'say("final")', 'wait("go")', 'say("end")')
    job.both_say("final")
    run = job.next_run(run)
    (job.folder / "go").touch()
    assert run.wait(WAIT_S) == 0
    assert job.errors() == ""
    assert [line for line in job.both() if "end" in line] == ["0 end", "1 end"]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ('say("x")\nif rank == 1: wait("go")\nfence()', "step 1 waits for an answer of its PMI server"),
        (
            'line("cmd=publish_name service=a port=b"); say("x")',
            "step 1 has published a name, or connects to another MPI program",
        ),
        (
            'for i in range(70): put("k%d" % i, 1000 * "v")\nsay("x")',
            "step 1 has told its PMI server more than a checkpoint keeps",
        ),
    ],
    ids=["fence", "name", "much"],
)
def test_what_the_next_server_cannot_be_told_delays_a_hold(job: ServedJob, what: str, why: str) -> None:
    run = job.mpi("1", what, "time.sleep(1000)")
    job.both_say("x")
    time.sleep(0.3)
    assert job.delay() == why
    run.terminate()
    run.wait(WAIT_S)


def test_a_server_that_refuses_ends_the_step(job: ServedJob) -> None:
    run = job.mpi("1", *BEGIN, 'put("refused", "x")', 'say("y")', "time.sleep(1000)")
    job.both_say("y")
    (job.folder / "refuses").touch()
    run = job.next_run(run)
    assert run.wait(WAIT_S) == 0
    why = "vhpc: the MPI program cannot continue in this step: its PMI server says: cmd=put_result rc=1"
    assert why in job.both()
    assert "status 126" in job.both()
