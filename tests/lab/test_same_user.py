# SPDX-License-Identifier: Apache-2.0
"""Terminals, requeue and settings of a user are the same in a guest as outside of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cluster import IMAGE, Job, Lab
from injection import ask_again
from twins import SOURCES, says, submit, until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("probes")]

TERMINALS = (SOURCES / "terminals.py").read_text()


def typed(lab: Lab, image: str | None) -> Any:
    """The answers of two shells in a job."""
    words = ["salloc", "-Q", "--no-shell", "-n1", "--mem=700", "-t", "15", "-J", "terminals"]
    lab.run("login", *words, *([f"--vhpc-image={image}"] if image else []), user="alice", timeout=300)
    out = lab.run("login", "squeue", "-h", "-n", "terminals", "-o", "%A", user="alice").out
    job = Job(lab, int(out), "alice")
    try:
        done = lab.run("login", "python3", "-", str(job.id), user="alice", stdin=TERMINALS, timeout=600)
    finally:
        lab.run("login", "scancel", str(job.id), user="alice")
        job.leave_queue(120)
    return json.loads(done.out)


@pytest.mark.promise("job.pty")
@pytest.mark.results
def test_two_terminals_in_a_job_are_the_same(lab: Lab) -> None:
    """Each has its own size; Ctrl-Z and Ctrl-\\ go to the program in the foreground of theirs."""
    ours, theirs = (typed(lab, image) for image in (IMAGE, None))
    assert ours == theirs
    assert ours[:2] == [["30 90"], ["40 120"]]
    assert [[one[-1] for one in both] for both in ours[2:4]] == [["31 91", "40 120"], ["31 91", "32 91"]]
    stopped, quit_, *_ = ours[4:]
    assert [line.split()[0] for line in stopped[-2:]] == ["148", "[1]+"]
    assert "131" in quit_
    assert ours[-3:] == [3, ["alone"], 4]


@pytest.mark.promise("job.commands")
@pytest.mark.results
def test_a_script_that_requeues_its_job_is_the_same(lab: Lab) -> None:
    """At USR1; the second run's output is behind that of the first."""
    # slurmstepd says at any moment that it ends the first run: not between the lines of the script
    streams = ("--open-mode=append", "-e", "/home/alice/slurm-%j.err")
    twins = submit(lab, (SOURCES / "requeue.job").read_text(), "-n1", "--requeue", *streams)
    for job in twins:
        says(job, "ready")
        lab.run("login", "scancel", "-s", "USR1", "--batch", str(job.id), user="alice")
        ask_again(lab, job)
        says(job, "run 1")
        until(lambda job=job: job.show()["JobState"] == "COMPLETED", f"the end of {job.id}")  # type: ignore[misc]
    ours, theirs = twins.outputs()
    assert ours == theirs == "run 0\nready\ngot USR1\nrun 1\n"
    assert all("DUE TO JOB REQUEUE" in text for text in twins.outputs("slurm-{id}.err"))


NUMBERS = "cat /proc/sys/fs/nr_open /proc/sys/fs/file-max /proc/sys/kernel/pid_max"


@pytest.mark.promise("job.environment")
@pytest.mark.results
def test_settings_of_the_user_are_the_same(lab: Lab) -> None:
    """Limits, umask, threads, a terminal that the system does not know, and an agent that is elsewhere."""
    script = """
    for which in n c s u v x q; do echo "$which $(ulimit -S$which) $(ulimit -H$which)"; done
    umask; touch file-$SLURM_JOB_ID; stat -c %a file-$SLURM_JOB_ID
    nproc; echo "threads ${OMP_NUM_THREADS-none}"; srun -Q nproc
    OMP_NUM_THREADS=1 OMP_THREAD_LIMIT=1 nproc
    echo "$TERM $SSH_AUTH_SOCK"; ls "$SSH_AUTH_SOCK" 2>&1
    tput clear 2>&1; TERM=xterm-256color tput colors
    mkdir cores-$SLURM_JOB_ID; cd cores-$SLURM_JOB_ID
    exec 2>/dev/null # where bash says which process it was
    (ulimit -c unlimited; sh -c 'kill -SEGV $$'; echo $?); ls | tr -d '0-9.'
    (ulimit -c 0; rm core*; sh -c 'kill -SEGV $$'; echo $?); ls
    """
    before = (
        "ulimit -Sn 1000; ulimit -Ss 16000; ulimit -Sc 1000; umask 037; export TERM=not-known "
        "SSH_AUTH_SOCK=/tmp/ssh-x/agent.1 OMP_NUM_THREADS=3"
    )
    ours, theirs = submit(lab, script, "-n1", "-c2", before=before).wait().outputs()
    assert ours == theirs
    for line in (
        "n 1000 ",
        "s 16000 ",
        "0037\n640\n",
        "threads 3\n",
        'unknown terminal "not-known"',
        "\n139\n",
    ):
        assert line in ours
    job = lab.finish(NUMBERS, "-w", "n1")
    numbers = [int(word) for word in job.output().split()]
    assert numbers[0] >= 1073741816  # as systemd has them on nodes
    assert numbers[1:] == [2**63 - 1, 4194304]
