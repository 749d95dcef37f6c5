# SPDX-License-Identifier: Apache-2.0
"""Steps of PMIx in held guests: their connections continue with the next step's server and namespace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest_processes import CONTROL_OPERATIONS, WAIT_S
from steps_rig import ServedJob

from pace import until

pytest_plugins = ["guest_rig", "steps_rig"]
pytestmark = CONTROL_OPERATIONS

SRUN = Path(__file__).with_name("pmix_srun.py")
# A task as Open MPI is: it keeps its connection, and each request waits for its answer.
TASK = """
import os, socket, struct, sys, time
rank = int(os.environ["PMIX_RANK"])
other = 1 - rank
name = os.environ["PMIX_NAMESPACE"].encode() + b"\\0"
text = b"\\2" + bytes([2 * len(name)]) + name
def connect():
    global link, tag
    tag = 100
    link = socket.create_connection(("127.0.0.1", int(os.environ["PMIX_SERVER_URI41"].rpartition(":")[2])))
    who = b"native\\0" + bytes(5) + name + struct.pack("=I", rank) + b"5.0.7\\0v41\\0\\1hash\\0"
    link.sendall(b"\\xff" * 8 + struct.pack("=II", len(who), 0) + who)
    status, index = struct.unpack(">iI", link.recv(8, socket.MSG_WAITALL))
    assert (status, index) == (0, rank), (status, index)
def ask(content):
    global tag
    tag += 1
    link.sendall(struct.pack(">IIII", 5, tag, len(content), 0) + content)
    if content[1] == 14:
        return
    head = struct.unpack(">IIII", link.recv(16, socket.MSG_WAITALL))
    assert head[1] == tag, head
    return link.recv(head[2], socket.MSG_WAITALL)
def good(content):
    said = ask(content)
    assert said == b"\\2\\0", said
def put(value):
    good(b"\\2\\2" + value.encode() + text)
def fence():
    good(b"\\2\\3\\2\\1" + text + b"\\xfe\\xff\\xff\\xff\\x0f\\2\\0")
def get(rank):
    said = ask(b"\\2\\4" + text + bytes([rank]) + b"\\2\\0")
    assert said[:3] == b"\\2\\0\\2" and said[3] == len(said) - 4 and said[4:].startswith(text), said
    return said[5 + len(text):].removesuffix(text).decode()
def finalize():
    good(b"\\2\\5")
    link.close()
def say(*words):
    print(rank, *words, flush=True)
def wait(name):
    while not os.path.exists(name):
        time.sleep(0.02)
for step in sys.argv[1:]:
    exec(step)
"""
BEGIN = ("connect()", r'good(b"\2\r\2\0\2\0")', 'put("at%d" % rank)', "fence()", 'say("up")')


class PmixJob(ServedJob):
    """A job whose srun has a PMIx server."""

    def asked(self, step: int) -> list[str]:
        """The commands that a step's server was asked, with their two tasks."""
        found = [line.split() for line in self.out("asked").splitlines()]
        return [f"{rank} {command}" for number, rank, command in found if int(number) == step]


@pytest.fixture
def job(programs: Path, tmp_path: Path) -> Iterator[PmixJob]:
    made = PmixJob(programs, tmp_path, SRUN, "pmix-errors", TASK)
    yield made
    made.close()


def test_values_are_found_under_the_next_steps_namespace(job: PmixJob) -> None:
    """Read for the first time in the next run, and values of the runs between; the names' lengths differ."""
    run = job.mpi(
        *BEGIN,
        *('wait("go")', 'say("got", get(other))', "fence()", 'put("new%d" % rank)', "fence()"),
        *('say("new")', 'wait("end")'),
        *('say("last", get(other))', "fence()", "finalize()", "sys.exit(3 + rank)"),
    )
    job.both_say("up")
    run = job.next_run(run)
    until(lambda: job.asked(2).count("0 2") == job.asked(2).count("1 2") == 1, "what both have committed")
    run = job.next_run(run)
    (job.folder / "go").touch()
    job.both_say("new")
    run = job.next_run(run)
    (job.folder / "end").touch()
    assert run.wait(WAIT_S) == 0, job.out("err")
    assert job.errors() == ""
    wanted = ["up", "got at{}", "new", "last new{}"]
    lines = [f"{rank} {line}".replace("{}", str(1 - rank)) for rank in (0, 1) for line in wanted]
    assert sorted(job.both()) == sorted([*lines, "status 4"])
    # registered, committed; the next server too, but it has no fence; and each server is left
    assert job.asked(1).count("0 3") == 1
    assert sorted(job.asked(2)) == sorted(f"{rank} {command}" for rank in (0, 1) for command in (13, 2, 5))


def test_a_pmix_step_continues_in_the_same_run(job: PmixJob) -> None:
    run = job.mpi(*BEGIN, 'wait("go")', "fence()", 'say("done", get(other))', "finalize()")
    job.both_say("up")
    for _ in range(3):
        job.hold()
        job.release()
        until(lambda: len(job.sruns()) == job.serial + 1, "the next srun")
    (job.folder / "go").touch()
    assert run.wait(WAIT_S) == 0
    assert job.errors() == ""
    assert [line for line in job.both() if "done" in line] == ["0 done at1", "1 done at0"]


def test_a_request_that_was_not_read_reaches_the_next_server(job: PmixJob) -> None:
    """The program asks all the time, so it is stopped before, in or after a request."""
    run = job.mpi(
        *BEGIN,
        'while not os.path.exists("go"): assert get(other) == "at%d" % other',
        *("fence()", 'say("done")', "finalize()"),
    )
    job.both_say("up")
    for _ in range(3):
        run = job.next_run(run)
    (job.folder / "go").touch()
    assert run.wait(WAIT_S) == 0, job.out("err")
    assert job.errors() == ""
    assert [line for line in job.both() if "done" in line] == ["0 done", "1 done"]


def test_a_fence_does_not_begin_while_tasks_are_detached(job: PmixJob) -> None:
    """One task would wait in it for another, which is detached and waits for the end of the step."""
    run = job.mpi(*BEGIN, 'wait("go" if rank == 0 else "later")', "fence()", 'say("done")', "finalize()")
    job.both_say("up")
    job.prepare()
    (job.folder / "go").touch()
    time.sleep(0.5)
    job.hold_prepared()
    job.restore()
    run.wait(WAIT_S)
    run = job.attach()
    (job.folder / "later").touch()
    assert run.wait(WAIT_S) == 0, job.out("err")
    assert job.errors() == ""
    assert [line for line in job.both() if "done" in line] == ["0 done", "1 done"]


def test_connections_may_begin_and_end_in_any_run(job: PmixJob) -> None:
    run = job.mpi(
        *('say("first")', 'wait("one")', *BEGIN, "first = link", "connect()", 'say("second")', 'wait("two")'),
        *("say(get(other))", "finalize()", "link = first", "tag = 110", "say(get(other))", "finalize()"),
        *('say("closed")', 'wait("three")', 'say("end")'),
    )
    job.both_say("first")
    for word, file in (("second", "one"), ("closed", "two")):
        run = job.next_run(run)
        (job.folder / file).touch()
        job.both_say(word)
    run = job.next_run(run)
    (job.folder / "three").touch()
    assert run.wait(WAIT_S) == 0
    assert job.errors() == ""
    assert [job.both().count(line) for line in ("0 at1", "1 at0", "0 end", "1 end")] == [2, 2, 1, 1]


def test_a_finalized_connection_of_pmix_has_not_died(job: PmixJob) -> None:
    run = job.mpi(*BEGIN, r'good(b"\2\5")', 'say("final")', 'wait("go")', 'link.close(); say("end")')
    job.both_say("final")
    run = job.next_run(run)
    (job.folder / "go").touch()
    assert run.wait(WAIT_S) == 0
    assert job.errors() == ""


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ('connect(); say("x")\nif rank == 1: wait("go")\nfence()', "waits for an answer of its PMIx server"),
        (
            r'connect(); good(b"\2\x18"); say("x")',
            "has used PMIx to find or to follow other programs",
        ),
        ('connect(); put(70000 * "v"); say("x")', "has told its PMIx server more than a checkpoint keeps"),
    ],
    ids=["fence", "group", "much"],
)
def test_what_no_other_pmix_server_can_take_over_delays_a_hold(job: PmixJob, what: str, why: str) -> None:
    run = job.mpi(what, "time.sleep(1000)")
    job.both_say("x")
    time.sleep(0.3)
    assert job.delay() == f"step 1 {why}"
    run.terminate()
    run.wait(WAIT_S)


def test_a_pmix_server_that_refuses_ends_the_step(job: PmixJob) -> None:
    run = job.mpi(*BEGIN, "time.sleep(1000)")
    job.both_say("up")
    (job.folder / "refuses").touch()
    run = job.next_run(run)
    assert run.wait(WAIT_S) == 0
    assert any("cannot continue: its new PMIx server does not accept it" in line for line in job.both())
    assert "status 126" in job.both()
