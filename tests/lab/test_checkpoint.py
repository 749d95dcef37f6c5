# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a job's guests are saved, and another job continues them, elsewhere and later."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from cluster import IMAGE, Job, Lab, publish
from injection import await_requeue, ours, output_meets, prints, runs, said, settled, start_soon, until
from saving import FOLDER, checkpoint, checkpoints_on, requeue

pytestmark = pytest.mark.lab

TURNS = 40
# Writes each number to its output and to a file that it keeps open, and the time at the end.
COUNT = f"""
i=0; exec 3>>~/$SLURM_JOB_ID.log
while [ $i -lt {TURNS} ]; do i=$((i+1)); echo $i; echo $i >&3; sleep 0.3; done
echo now $(date +%s)
srun -n1 sh -c 'echo job $SLURM_JOB_ID $(hostname)'
exit 7
"""
# Two guests exchange numbers over one TCP connection; a wrong one, or a closed connection, ends both.
TALK = """
import socket, sys, time
me, peer, turns = sys.argv[1], sys.argv[2], int(sys.argv[3])
if me == "first":
    listener = socket.create_server(("", 5001))
    link, _ = listener.accept()
else:
    while True:
        try:
            link = socket.create_connection((peer, 5001))
            break
        except OSError:
            time.sleep(0.1)
link.settimeout(None)
file = link.makefile("rwb")
for turn in range(turns):
    file.write(b"%d\\n" % turn)
    file.flush()
    got = int(file.readline())
    assert got == turn, (got, turn)
    if me == "first":
        print("turn", turn, flush=True)
    time.sleep(0.1)
print(me, "ended", flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def _checkpoints(lab: Lab) -> Iterator[None]:
    """The site has a folder for checkpoints."""
    with checkpoints_on(lab):
        yield


def numbers(text: str) -> list[int]:
    """The numbers that COUNT has written."""
    return [int(line) for line in text.split("\n") if line.isdigit()]


def counts(lab: Lab, job: Job, least: int = 5) -> None:
    """Wait until the job's script counts."""
    output_meets(job, lambda text: len(numbers(text)) >= least, f"job {job.id} to count", 240)


def shown(lab: Lab, name: str) -> dict[str, Any]:
    """The checkpoint's record in vhpcd."""
    done = lab.run("login", "vhpc", "checkpoint", "show", name, "--json", user="alice")
    found: dict[str, Any] = json.loads(done.out)
    return found


@pytest.fixture(scope="module")
def kept(lab: Lab, _checkpoints: None) -> Job:
    """A job of one CPU on n1 that was saved as ``kept``, and has ended with that."""
    job = lab.submit(COUNT, "-w", "n1", "-n1", "--mem=600")
    counts(lab, job)
    checkpoint(lab, str(job.id), "--stop", "--name", "kept")
    job.leave_queue()
    return job


@pytest.mark.promise("checkpoint.script")
def test_a_stopped_script_continues_on_another_node(lab: Lab, kept: Job) -> None:
    assert kept.show()["JobState"] == "CANCELLED"
    before = numbers(kept.output())
    assert before == list(range(1, len(before) + 1))
    others = [line for line in kept.output().splitlines() if not line.isdigit()]
    assert all(line.startswith("slurmstepd") for line in others), others
    assert len(before) < TURNS
    logged = numbers(lab.read("alice", f"{kept.id}.log"))
    # what the script writes while it is being stopped stays in its pipe, and the next job prints it
    assert logged == list(range(1, max(len(before), len(logged)) + 1))
    found = shown(lab, "kept")
    assert (found["state"], found["job"], found["nodes"]) == ("valid", kept.id, ["n1"])

    second = lab.submit("echo never", "-w", "n2", "-n1", "--mem=600", "--vhpc-resume=kept", image=None)
    assert second.wait(timeout=300) == "FAILED"
    assert second.accounted() == ["FAILED", "7:0"]
    after = second.output()
    assert numbers(after) == list(range(len(before) + 1, TURNS + 1)), after
    assert numbers(lab.read("alice", f"{kept.id}.log")) == list(range(1, TURNS + 1))
    assert "never" not in after
    # a command of Slurm names the job that runs now; the guest keeps its name
    assert re.search(rf"^job {second.id} n1$", after, re.M), after
    clock = re.search(r"^now (\d+)$", after, re.M)
    assert clock is not None, after
    ended = lab.run("ctl", "sacct", "-nXP", "-j", str(second.id), "-o", "End").out.strip()
    host = int(lab.run("ctl", "date", "-d", ended, "+%s").out)
    assert abs(int(clock[1]) - host) <= 5, (after, ended)
    settled(lab)


@pytest.mark.promise("checkpoint.continue")
def test_a_job_continues_after_its_checkpoint(lab: Lab) -> None:
    job = lab.submit(COUNT, "-w", "n1", "-n1")
    counts(lab, job)
    done = checkpoint(lab, str(job.id), "--json")
    assert '"valid"' in done.out
    assert job.wait(timeout=300) == "FAILED"
    assert numbers(job.output()) == list(range(1, TURNS + 1))
    assert job.accounted() == ["FAILED", "7:0"]
    settled(lab)


@pytest.mark.promise("checkpoint.network")
@pytest.mark.slow
def test_connections_between_guests_survive(lab: Lab) -> None:
    image = "debian-hpc"  # has ssh
    publish(image)
    turns = 80
    # a busy machine emulates an sshd that says nothing for longer than ssh between guests waits
    script = (
        f"cat > ~/talk.py <<'END'\n{TALK}\nEND\n"
        f"ssh -n -o ServerAliveInterval=60 n2 python3 talk.py second n1 {turns} || kill $$ &\n"
        f"python3 talk.py first n2 {turns}; wait"
    )
    pair = ("-N2", "--ntasks-per-node=1", "--vhpc-network=job")
    first = lab.submit(script, *pair, image=image)
    prints(first, "turn 5\n", 400)
    checkpoint(lab, str(first.id), "--stop", "--name", "talk")
    first.leave_queue()
    second = lab.submit("true", "-N2", "--ntasks-per-node=1", "--vhpc-resume=talk", image=None)
    assert second.wait(timeout=400) == "COMPLETED", said(lab, second)
    text = first.output() + second.output()
    assert [int(one) for one in re.findall(r"^turn (\d+)$", text, re.M)] == list(range(turns)), text
    assert {"first ended", "second ended"} <= set(text.split("\n")), text
    settled(lab)


def refused(lab: Lab, what: str, *words: str, user: str = "alice") -> None:
    """The command fails with one line of ours that says this."""
    done = lab.run("login", *words, user=user, check=False, timeout=300)
    assert done.code != 0, done
    lines = [line for line in ours(done.err) if not re.search(r": \d of \d nodes", line)]  # no progress
    assert len(lines) == 1, done
    assert re.search(what, lines[0]), lines


@pytest.mark.promise("checkpoint.refused")
def test_what_cannot_be_saved_is_refused(lab: Lab) -> None:
    refused(lab, "job 4000000", "vhpc", "checkpoint", "4000000")
    plain = lab.submit("sleep 300", "-w", "n2", "-n1", image=None)
    plain.wait("RUNNING")
    refused(lab, f"job {plain.id}", "vhpc", "checkpoint", str(plain.id))
    busy = lab.submit("srun --wait=30 sleep 300", "-w", "n1", "-n1")
    until(lambda: f"{busy.id}.0" in lab.run("ctl", "squeue", "-s", "-h").out, "the step to run", 240)
    refused(lab, f"job {busy.id}", "vhpc", "checkpoint", str(busy.id), user="bob")
    refused(lab, "runs", "vhpc", "checkpoint", str(busy.id))
    assert busy.show()["JobState"] == "RUNNING"
    lab.run("login", "scancel", str(busy.id), str(plain.id), user="alice")
    settled(lab)


@pytest.mark.promise("checkpoint.requeue", "checkpoint.drain")
def test_jobs_of_a_drained_node_continue_elsewhere(lab: Lab) -> None:
    job = lab.submit(COUNT, "-n1", "-w", "n1", "--open-mode=append")
    once = lab.submit("echo up; sleep 600", "-n1", "-w", "n1", "--no-requeue")
    counts(lab, job)
    runs(lab, once)
    done = lab.run("ctl", "vhpc", "node", "drain", "n1", "--json", check=False, timeout=300)
    try:
        assert done.code == 1, done
        saved, stays = json.loads(done.out)["jobs"]
        assert (saved["job"], saved["error"]) == (job.id, None)
        assert (stays["job"], stays["checkpoint"]) == (once.id, None)
        assert "may not be put back into the queue" in stays["error"]
        assert once.show()["JobState"] == "RUNNING"
        assert job.id < once.id  # the order of the list
        await_requeue(job)
        lab.run("ctl", "scontrol", "update", f"JobId={job.id}", "ReqNodeList=n2")
        start_soon(lab, job.id)
        assert job.wait(timeout=300) == "FAILED"
        assert numbers(job.output()) == list(range(1, TURNS + 1)), job.output()
        assert numbers(lab.read("alice", f"{job.id}.log")) == list(range(1, TURNS + 1))
        assert job.accounted("ExitCode,NodeList") == ["7:0", "n2"]
    finally:
        lab.run("ctl", "scancel", str(once.id))
        lab.resume("n1")
    settled(lab)


@pytest.mark.promise("checkpoint.requeue")
@pytest.mark.slow
def test_a_requeued_job_continues_in_its_own_output(lab: Lab) -> None:
    job = lab.submit(COUNT, "-n1", "--open-mode=append")
    counts(lab, job)
    requeue(lab, job)
    assert job.wait(timeout=300) == "FAILED"
    assert numbers(job.output()) == list(range(1, TURNS + 1)), job.output()
    assert numbers(lab.read("alice", f"{job.id}.log")) == list(range(1, TURNS + 1))
    assert job.accounted() == ["FAILED", "7:0"]
    settled(lab)


def ran_again(job: Job, restart: int) -> bool:
    """Whether the job is in the queue again, or has ended for good."""
    return ended(job) or job.show()["Restarts"] == str(restart)


def ended(job: Job) -> bool:
    """Whether the job has ended for good."""
    return job.show()["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")


@pytest.mark.promise("checkpoint.limit")
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_job_longer_than_its_time_limit_ends_by_itself(lab: Lab) -> None:
    turns = 400
    script = COUNT.replace(str(TURNS), str(turns)).replace("sleep 0.3", "sleep 0.5")
    job = lab.submit(script, "-n1", "--time=3", "--open-mode=append", "--vhpc-checkpoint=limit")

    for restart in range(1, 10):
        until(partial(ran_again, job, restart), f"run {restart} of job {job.id}", 400)
        if ended(job):
            break
        start_soon(lab, job.id)
    assert job.accounted() == ["FAILED", "7:0"], job.output()
    assert numbers(job.output()) == list(range(1, turns + 1)), job.output()
    assert int(job.show()["Restarts"]) >= 1
    settled(lab)


@pytest.mark.promise("checkpoint.every")
@pytest.mark.slow
def test_a_job_that_is_saved_at_intervals_continues_from_there(lab: Lab) -> None:
    turns = 400
    script = COUNT.replace(str(TURNS), str(turns))
    job = lab.submit(script, "-n1", "-w", "n1", "--open-mode=append", "--vhpc-checkpoint=every:1m")
    counts(lab, job)
    until(lambda: saved(lab, job), f"a checkpoint of job {job.id}", 240)
    counts(lab, job, len(numbers(said(lab, job))) + 10)
    lab.run("ctl", "scontrol", "requeue", str(job.id))  # as Slurm does when a node fails
    await_requeue(job)
    first = numbers(job.output())
    start_soon(lab, job.id)
    assert job.wait(timeout=500) == "FAILED"
    assert job.accounted() == ["FAILED", "7:0"]
    again = numbers(job.output())[len(first) :]
    assert first == list(range(1, len(first) + 1))
    assert again == list(range(again[0], turns + 1)), job.output()
    assert 5 < again[0] <= len(first)
    settled(lab)


def saved(lab: Lab, job: Job) -> bool:
    """Whether the job has a valid checkpoint."""
    done = lab.run("login", "vhpc", "checkpoint", "ls", "--job", str(job.id), "--json", user=job.user)
    return any(row["state"] == "valid" for row in json.loads(done.out)["checkpoints"])


@pytest.mark.promise("checkpoint.preempt")
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_preempted_job_continues(lab: Lab) -> None:
    turns = 200
    script, one = COUNT.replace(str(TURNS), str(turns)), ("-w", "n1", "-n1", "--exclusive")
    grace = ("scontrol", "update", "PartitionName=spare")
    lab.run("ctl", *grace, "GraceTime=120")
    try:
        low = lab.submit(script, *one, "-p", "spare", "--open-mode=append", "--vhpc-checkpoint=preempt")
        counts(lab, low)
        urgent = lab.submit("true", *one, "-p", "urgent", user="bob", image=None)
        assert urgent.wait(timeout=300) == "COMPLETED"
    finally:
        lab.run("ctl", *grace, "GraceTime=0")
    await_requeue(low)
    assert len(numbers(low.output())) < turns
    start_soon(lab, low.id)
    assert low.wait(timeout=400) == "FAILED"
    assert numbers(low.output()) == list(range(1, turns + 1)), low.output()
    assert low.accounted() == ["FAILED", "7:0"]
    settled(lab)


@pytest.mark.promise("checkpoint.refused")
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (
            ("sbatch", "--vhpc-checkpoint=soon", "--wrap=:"),
            "'none' or a list of 'limit', 'preempt' and 'every:N' is expected",
        ),
        (("sbatch", "--vhpc-checkpoint=limit", "--vhpc-batch=host", "--wrap=:"), "remove one of the two"),
        (("srun", "--vhpc-checkpoint=limit", "true"), "it is for sbatch only"),
        (("salloc", "--vhpc-checkpoint=limit", "true"), "it is for sbatch only"),
    ],
    ids=["word", "host", "srun", "salloc"],
)
def test_jobs_that_cannot_be_saved_are_not_submitted(lab: Lab, words: tuple[str, ...], what: str) -> None:
    done = lab.run("login", words[0], f"--vhpc-image={IMAGE}", *words[1:], user="alice", check=False)
    assert done.code != 0, done
    assert what in done.err


@pytest.mark.promise("checkpoint.shape")
@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--vhpc-resume=nothing-of-this-name",), "nothing-of-this-name"),
        (("--vhpc-resume=kept", "-c2", "--mem=600"), "needs 1 CPUs on"),
        (("--vhpc-resume=kept", "-N2", "--mem=600"), "ask for --nodes=1"),
        (("--vhpc-resume=kept", "--mem=700"), "needs 600 MiB of memory on"),
    ],
    ids=["unknown", "cpus", "nodes", "memory"],
)
def test_a_resume_of_another_shape_fails_its_job(
    lab: Lab, kept: Job, options: tuple[str, ...], what: str
) -> None:
    job = lab.finish("echo never", "--ntasks-per-node=1", *options, image=None)
    lines = ours(job.output())
    assert len(lines) == 1, job.output()
    assert re.search(what, lines[0]), lines
    assert job.accounted() == ["FAILED", "1:0"]
    settled(lab)


@pytest.mark.promise("checkpoint.seal")
def test_changed_bytes_are_not_loaded(lab: Lab, kept: Job) -> None:
    serial = shown(lab, "kept")["serial"]
    file = f"{FOLDER}/{serial}/0.state"
    flip = (
        f"f = open('{file}', 'r+b'); f.seek(5000000); x = f.read(1)[0] ^ 1; "
        "f.seek(-1, 1); f.write(bytes([x]))"
    )
    lab.run("n1", "cp", file, f"{FOLDER}/kept")
    lab.run("n1", "/opt/vhpc/bin/python", "-c", flip)
    try:
        job = lab.finish("echo never", "-n1", "--mem=600", "--vhpc-resume=kept", image=None)
    finally:
        lab.run("n1", "sh", "-c", f"cat {FOLDER}/kept > {file}; rm {FOLDER}/kept")
    lines = ours(job.output())
    assert len(lines) == 1, job.output()
    assert "damaged" in lines[0]
    settled(lab)


@pytest.mark.promise("checkpoint.owner")
def test_checkpoints_are_listed_and_removed(lab: Lab, kept: Job) -> None:
    rows = lab.run("login", "vhpc", "checkpoint", "ls", "--json", user="alice").out
    assert '"kept"' in rows
    assert '"kept"' not in lab.run("login", "vhpc", "checkpoint", "ls", "--json", user="bob").out
    refused(lab, "kept", "vhpc", "checkpoint", "rm", "kept", user="bob")
    serial = shown(lab, "kept")["serial"]
    lab.run("login", "vhpc", "checkpoint", "rm", "kept", user="alice")
    refused(lab, "kept", "vhpc", "checkpoint", "show", "kept")
    assert lab.vhpc("n1", "reconcile")
    assert lab.run("n1", "test", "-e", f"{FOLDER}/{serial}", check=False).code != 0
