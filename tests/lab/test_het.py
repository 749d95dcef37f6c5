# SPDX-License-Identifier: Apache-2.0
"""Heterogeneous jobs with one job network: the same steps as without guests, MPI, faults."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from cluster import IMAGE, Job, Lab, without_retries
from injection import kill_qemu, ours, paused, prints, runs, said, settled, until, waits
from pmi_client import CLIENT
from twins import sections

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

JOB = "--vhpc-network=job"
SIZE = ("-N1", "-n2", "--mem=600")
GUEST = (f"--vhpc-image={IMAGE}", JOB)
SCRIPT = rf"""
exec 2>&1
cat > ~/client.py <<'END'
{CLIENT}
END
echo up
where='echo $SLURM_PROCID of $SLURM_NTASKS: $SLURM_LOCALID on $(hostname),'
where="$where"' node $SLURM_NODEID of $SLURM_STEP_NODELIST'
step() {{ echo "== $1"; shift; timeout 100 srun -Q "$@" | sort; }}
step both --het-group=0,1 sh -c "$where"
step second --het-group=1 sh -c "$where; exit \$((3 * SLURM_LOCALID))"
step first -n1 sh -c "$where"
step pmi1 --mpi=pmi2 --het-group=0,1 python3 ~/client.py 1
step pmi2 --mpi=pmi2 --het-group=0,1 python3 ~/client.py 2
step one-component --mpi=pmi2 --het-group=1 python3 ~/client.py 2
echo == network
if [ "$VHPC_NODELIST" ]; then
    names='echo $VHPC_NODELIST $(cat $VHPC_HOSTFILE | tr "\n" " ")'
    ping='for n in n1 n2; do ping -c1 -W5 -M do -s 1300 $n | grep -o " 0% packet loss"; done'
    srun -Q --het-group=0,1 -l sh -c "$names; $ping" | sort
fi
echo == end
until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.2; done
echo done
"""


def submit(
    lab: Lab, script: str, first: tuple[str, ...] = GUEST, second: tuple[str, ...] = GUEST
) -> tuple[Job, Job]:
    """Submit a job of a component on n1 and one on n2, with these options; returns both."""
    words = ("-w", "n1", *SIZE, *first, ":", "-w", "n2", *SIZE, *second)
    done = lab.run("login", "sbatch", "--parsable", *words, user="alice", stdin=f"#!/bin/sh\n{script}\n")
    number = int(done.out)
    return Job(lab, number, "alice"), Job(lab, number + 1, "alice")


def ended(lab: Lab, job: Job) -> list[str]:
    """Wait until no component is left; the states of both in Slurm's accounting."""
    queued = ("squeue", "-h", "-j", str(job.id))
    until(lambda: not lab.run("ctl", *queued, check=False).out.strip(), f"the end of job {job.id}", 200)

    def states() -> list[str]:
        rows = lab.run("ctl", "sacct", "-nXP", "-j", str(job.id), "-o", "JobID,State").out.splitlines()
        found = [row.partition("|")[2].split()[0] for row in sorted(rows)]
        return [] if {"RUNNING", "PENDING", "COMPLETING"} & set(found) else found

    return until(states, f"the states of job {job.id}", 30)


def let_go(lab: Lab, job: Job) -> None:
    lab.run("login", "touch", f"/home/alice/go-{job.id}", user="alice")


@pytest.fixture(scope="module")
def jobs(lab: Lab) -> Iterator[tuple[Job, Job]]:
    """The same job with guests and without: the one with guests has run all its steps, and runs on.

    vhpcd is killed while the first component waits for the second one's guest.
    """
    plain, _ = submit(lab, SCRIPT, (), ())  # the nodes have no room for both at once
    runs(lab, plain)
    let_go(lab, plain)
    assert ended(lab, plain) == ["COMPLETED", "COMPLETED"]
    first, second = submit(lab, SCRIPT)
    paused(lab, second, "n2")
    waits(lab, first, "n1")
    assert said(lab, first) == "", "the script has started before n2's guest was ready"
    lab.service("ctl", "kill", "vhpcd")
    lab.service("ctl", "start", "vhpcd")
    kill_qemu(lab, second, "n2", "CONT")
    prints(first, "== end", 300)
    yield first, plain
    let_go(lab, first)
    settled(lab)


@pytest.mark.promise("het.network")
@pytest.mark.results
@pytest.mark.parametrize("name", ["both", "second", "first", "pmi1", "pmi2", "one-component"])
def test_steps_over_components_do_the_same(lab: Lab, jobs: tuple[Job, Job], name: str) -> None:
    inside, outside = (sections(without_retries(said(lab, job)))[name] for job in jobs)
    assert inside == outside
    assert inside


@pytest.mark.results
def test_ranks_of_all_components_find_each_other(lab: Lab, jobs: tuple[Job, Job]) -> None:
    """Lest both jobs be equal because nothing worked in either."""
    found = sections(without_retries(said(lab, jobs[0])))
    assert "3 of 4: 1 on n2, node 1 of n[1-2]\n" in found["both"]
    for name in ("pmi1", "pmi2"):
        assert found[name].count("hosts n1 n1 n2 n2\n") == 4
        assert found[name].count("mapping (vector,(0,2,2))\n") == 4
    assert found["one-component"].count("hosts n2 n2\n") == 2


@pytest.mark.promise("het.network")
@pytest.mark.results
def test_guests_of_all_components_are_on_one_network(lab: Lab, jobs: tuple[Job, Job]) -> None:
    lines = sections(without_retries(said(lab, jobs[0])))["network"].splitlines()
    names = "n1,n2 n1 slots=2 n2 slots=2"
    assert [line.rstrip() for line in lines] == [
        f"{rank}:  0% packet loss" if line else f"{rank}: {names}" for rank in range(4) for line in (1, 1, 0)
    ]


@pytest.mark.promise("het.network")
def test_a_component_that_ends_leaves_the_network(lab: Lab, jobs: tuple[Job, Job]) -> None:
    """n2 serves the next job at once, n1 forgets it, and the first component runs on."""
    job, _ = jobs
    lab.run("ctl", "scancel", f"{job.id}+1")
    gone = f"ls /var/lib/vhpc/journal | grep -q '^{job.id + 1}[.]'"
    until(lambda: lab.run("n2", "sh", "-c", gone, check=False).code, "the end on n2", 60)
    next_job = lab.finish("hostname", "-w", "n2", JOB)
    assert next_job.output() == "n2\n"
    lab.vhpc("n1", "reconcile", check=False)  # what the health check does at its intervals
    assert lab.vhpc("n1", "reconcile", "--check") == []
    script = (
        "for x in $(ip -o link | grep -o 'vhpcx[0-9]*'); do bridge fdb show dev $x | grep ' dst '; done;"
        "for b in $(ip -o link | grep -o 'vhpcb[0-9]*'); do ip neighbour show dev $b; done;"
        "nft list ruleset | grep 10.77.0.12"
    )
    assert lab.run("n1", "sh", "-c", script, check=False).out == ""
    assert said(lab, job).splitlines()[-1] == "== end", "the first component runs on"
    let_go(lab, job)
    assert ended(lab, job) == ["COMPLETED", "CANCELLED"]


@pytest.mark.promise("het.network")
def test_a_guest_that_does_not_come_up_fails_all_components(lab: Lab) -> None:
    first, second = submit(lab, "echo up")
    running = f"virsh -q list --name --state-running | grep -q '^vhpc-{second.id}-'"
    until(lambda: lab.run("n2", "sh", "-c", running, check=False).code == 0, "its guest")
    kill_qemu(lab, second, "n2")
    assert ended(lab, first)[0] == "FAILED"
    (line,) = ours(first.output())
    assert re.match(r"vhpc: node n2: the guest ended on n2 while image .* booted", line), line
    assert "up" not in first.output().splitlines()
    settled(lab)


def test_a_component_on_hosts_starts_the_other_alone(lab: Lab) -> None:
    """It has no network with the guests of the other one, and MPI between them is refused."""
    script = (
        "exec 2>&1\ncat > ~/client.py <<'END'\n" + CLIENT + "\nEND\necho $VHPC_NODELIST on $(hostname)\n"
        "srun -Q --het-group=1 -n1 sh -c 'echo $VHPC_NODELIST in a guest of $(hostname)'\n"
        "srun -Q --mpi=pmi2 --het-group=1 python3 ~/client.py 2; echo exit $?"
    )
    job, _ = submit(lab, script, ())
    assert ended(lab, job) == ["COMPLETED", "COMPLETED"]
    lines = [line for line in job.output().splitlines() if not line.startswith("srun: ")]
    assert lines[:2] == ["on n1", "n2 in a guest of n2"]
    assert len(lines) == 4, lines
    assert "the components of this heterogeneous job have no network in common" in lines[2]
    assert lines[3] == "exit 126"


def test_an_image_that_one_component_lacks_fails_all(lab: Lab) -> None:
    job, _ = submit(lab, "echo up", second=("--vhpc-image=no-such", JOB))
    assert ended(lab, job)[0] == "FAILED"
    (line,) = ours(job.output())
    assert "component 1 of the heterogeneous job: image no-such:latest is unknown" in line
    settled(lab)
