# SPDX-License-Identifier: Apache-2.0
"""Several guests of a job on each node: real jobs, real sockets, tasks where the manual says."""

from __future__ import annotations

import re
import time

import pytest
from cluster import Lab
from injection import in_boot, qemu_killer
from vcpus import THREADS

from pace import limit

pytestmark = pytest.mark.lab

TWO = ("--vhpc-guests-per-node=2", "--mem=1400")
WHERE = "$(hostname) $VHPC_GUEST/$VHPC_JOB_GUESTS $(nproc)"


@pytest.mark.promise("place.guests")
def test_tasks_fill_the_guests_of_each_node_in_blocks(lab: Lab) -> None:
    job = lab.submit(
        f'echo "script {WHERE} $(cat /proc/sys/kernel/random/boot_id)"\n'
        f"srun -N2 -n4 sh -c 'echo \"all $SLURM_PROCID $SLURM_LOCALID {WHERE} "
        "$(cat /proc/sys/kernel/random/boot_id)\"'\n"
        f"srun -N2 -n2 sh -c 'echo \"one $SLURM_PROCID {WHERE}\"'\n"
        # a copy in a folder of the guests' own has to come to each of them
        "echo in every guest > ~/sent; sbcast ~/sent /tmp/sent\n"
        "srun -N2 -n4 sh -c 'echo \"sent $SLURM_PROCID $(cat /tmp/sent)\"'\n"
        # a task of the second guest starts a step of its own
        "srun -N1 -n2 -w n1 sh -c 'test $VHPC_GUEST = 0 || "
        'srun --overlap -N1 -n1 -w n2 sh -c "echo inner \\$(hostname) \\$VHPC_GUEST"\'\n'
        "touch ~/several-$SLURM_JOB_ID; while [ -e ~/several-$SLURM_JOB_ID ]; do sleep 0.5; done",
        "-N2",
        "--ntasks-per-node=2",
        *TWO,
    )
    job.wait("RUNNING")
    marker, until = f"/home/alice/several-{job.id}", time.monotonic() + limit(240)
    while lab.run("login", "ls", marker, check=False).code != 0:
        assert time.monotonic() < until, job.show()
        assert job.show()["JobState"] == "RUNNING", job.output()
        time.sleep(0.5)
    for node in ("n1", "n2"):
        domains = lab.run(node, "virsh", "-q", "list", "--name").out.split()
        assert [name.rpartition("-")[2] for name in sorted(domains)] == ["g0", "g1"]
        threads = lab.run(node, "sh", "-c", THREADS.replace("JOB", str(job.id))).out.splitlines()
        # two guests of one vCPU, each pinned to a CPU of its own
        assert sorted(line.rpartition(" ")[2] for line in threads) == ["0", "1"], threads
        shown = [row for row in lab.vhpc(node, "ps", "--local") if row["job"] == job.id]
        assert [(row["guest"], row["runs"]) for row in shown] == [(0, True), (1, True)]
        assert len(lab.vhpc(node, "plan", str(job.id))["guests"]) == 2
    lab.run("login", "rm", marker, user="alice")
    assert job.wait() == "COMPLETED", job.output()
    out = job.output()
    script = re.search(r"^script (\S+) (\S+) (\d+) (\S+)$", out, re.M)
    assert script is not None, out
    assert script.groups()[:3] == ("n1-g0", "0/2", "1")
    tasks = sorted(re.findall(r"^all (\d) (\d) (\S+) (\S+) (\d+) (\S+)$", out, re.M))
    assert [task[:5] for task in tasks] == [
        ("0", "0", "n1-g0", "0/2", "1"),
        ("1", "1", "n1-g1", "1/2", "1"),
        ("2", "0", "n2-g0", "0/2", "1"),
        ("3", "1", "n2-g1", "1/2", "1"),
    ], out
    assert len({task[5] for task in tasks}) == 4, "each is a machine of its own"
    assert tasks[0][5] == script[4]
    ones = sorted(re.findall(r"^one (\d) (\S+) (\S+) \d+$", out, re.M))
    assert ones == [("0", "n1-g0", "0/2"), ("1", "n2-g0", "0/2")], out
    sent = sorted(re.findall(r"^sent (\d) (.*)$", out, re.M))
    assert sent == [(str(task), "in every guest") for task in range(4)], out
    assert re.findall(r"^inner (\S+) (\S+)$", out, re.M) == [("n2-g0", "0")], out


def test_a_job_without_the_option_has_a_guest_named_as_its_node(lab: Lab) -> None:
    job = lab.finish("echo $(hostname) [$VHPC_GUEST] [$VHPC_JOB_GUESTS]", "-n2", "-w", "n1")
    assert job.output() == "n1 [] []\n"


@pytest.mark.promise("place.guests")
def test_when_one_guest_does_not_come_up_none_is_left(lab: Lab) -> None:
    job = lab.submit("hostname", "-n2", "-w", "n1", *TWO)
    # a shim is started when all guests have been; before, a death would be the node's fault
    in_boot(lab, job, "n1", qemu_killer(job, guest="-g1"), sign="pgrep -x vhpc-shim >/dev/null")
    assert job.wait() == "FAILED"
    assert re.search(r"^vhpc: .*(did not boot|crashed|ended) on n1", job.output(), re.M), job.output()
    assert lab.leaks() == []
    assert "DRAIN" not in lab.node_state("n1")[0]


def test_a_job_cancelled_while_its_guests_boot_leaves_none(lab: Lab) -> None:
    job = lab.submit("hostname", "-n2", "-w", "n2", *TWO)
    in_boot(lab, job, "n2", "true", sign=f"pgrep -f '[g]uest=vhpc-{job.id}-.*-g0,' >/dev/null")
    lab.run("ctl", "scancel", str(job.id))
    assert job.wait() == "CANCELLED"


def test_more_guests_than_cores_is_a_user_error_on_stderr(lab: Lab) -> None:
    job = lab.finish("hostname", "-n2", "-w", "n1", "--vhpc-guests-per-node=3", "--mem=1400")
    assert job.accounted() == ["FAILED", "1:0"]
    assert "--vhpc-guests-per-node=3 is not possible: the job has 2 cores on a node" in job.output()
    assert "DRAIN" not in lab.node_state("n1")[0]


def test_an_invalid_number_is_refused_at_submission(lab: Lab) -> None:
    done = lab.run(
        "login", "sbatch", "--vhpc-image=debian-minimal", "--vhpc-guests-per-node=0",
        user="alice", stdin="#!/bin/sh\n", check=False,
    )  # fmt: skip
    assert done.code != 0
    assert "--vhpc-guests-per-node=0: a whole number from 1 to 64 is expected" in done.err
