# SPDX-License-Identifier: Apache-2.0
"""Jobs that Slurm makes smaller while they run, with guests and without."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from cluster import IMAGE, Job, Lab
from injection import kill_qemu, let_go, prints, runs, settled, until
from twins import Twins, plain

# Slurm 24.11 sometimes refuses to make a job smaller, or drains the released node ("Kill task failed"),
# without guests too; so these tests are not among those of each change.
pytestmark = [pytest.mark.lab, pytest.mark.slow]

JOB = ("--vhpc-network=job", "--chdir=/home/alice")
SIZE = ("-N2", "-n2", "--mem=700")
SCRIPT = """
cd ~; echo up; id=$SLURM_JOB_ID; export id
srun -N1 -n1 -w n2 --overlap --mem=0 sleep 600 2> released-$id & step=$!
until [ -e ~/shrink-$id ]; do sleep 0.2; done
scontrol update JobId=$id NumNodes=1 > /dev/null; echo update $?
wait $step; echo released step $?
. ./slurm_job_${id}_resize.sh; rm slurm_job_${id}_resize.*
echo $SLURM_NNODES $SLURM_JOB_NODELIST
srun sh -c 'echo $SLURM_NNODES $SLURM_JOB_NODELIST $SLURM_STEP_NODELIST $(hostname)'
srun -N2 hostname; echo two nodes: $?
scontrol update JobId=$id NumNodes=2 > /dev/null 2>&1; scontrol show job $id | grep -o ' NumNodes=.*NumCPUs'
echo resized
until [ -e ~/go-$id ]; do sleep 0.2; done
[ -z "$VHPC_HOSTFILE" ] || cat $VHPC_HOSTFILE $VHPC_MACHINEFILE > files-$id
srun sh -c '[ -z "$VHPC_NODELIST" ] || echo $VHPC_NODELIST > list-$id'
[ -z "$VHPC_HOSTFILE" ] || timeout 20 ping -c1 -W5 n2 > ping-$id 2>&1
echo done
"""


def shrink(lab: Lab, job: Job) -> None:
    """Let a script release its second node."""
    lab.run("login", "touch", f"/home/{job.user}/shrink-{job.id}", user=job.user)


def acknowledged(lab: Lab, job: Job) -> list[str]:
    """The nodes that have reported that they hold nothing of a running job."""
    (found,) = [one for one in lab.vhpc("ctl", "ps") if one["job"] == job.id]
    assert found["state"] == "ready"
    return list(found["acknowledged"])


def held(lab: Lab, job: Job, node: str) -> str:
    """Objects of a job that a node still has, found without code of vhpc."""
    script = (
        f"virsh -q list --all --name | grep '^vhpc-{job.id}-';"
        f"ls /var/lib/vhpc/journal | grep '^{job.id}[.]';"
        f"nft list tables | grep 'vhpc_{job.id}[.]'; ls -d /run/vhpc/jobs/{job.id} 2>/dev/null;"
        f"pgrep -af 'vhpc-{job.id}-|vhpc/jobs/{job.id}/' | grep -v ' sh -c '"
    )
    return lab.run(node, "sh", "-c", script, check=False).out


@pytest.fixture(scope="module")
def resized(lab: Lab) -> Iterator[tuple[Twins, Job]]:
    """Both jobs after they have become smaller, and a job that has waited for the released node."""
    twins = Twins(lab.submit(SCRIPT, *JOB, *SIZE), lab.submit(SCRIPT, *SIZE, image=None))
    for job in twins:
        runs(lab, job)
    # all memory of n2: it starts when both jobs have released the node
    memory = re.search(r"RealMemory=(\d+)", lab.run("ctl", "scontrol", "-o", "show", "node", "n2").out)
    assert memory is not None
    waiting = lab.submit("hostname", "-w", "n2", f"--mem={memory[1]}")
    kill_qemu(lab, twins.inside, "n2", "STOP")  # a guest that does not power off: the Epilog takes seconds
    shrink(lab, twins.outside)
    shrink(lab, twins.inside)
    for job in twins:
        prints(job, "resized")
    yield twins, waiting
    for job in twins:
        let_go(lab, job)
    settled(lab)


@pytest.fixture
def _nothing_left() -> None:
    """The jobs outlive single tests here."""


@pytest.mark.promise("resize.clean")
def test_a_smaller_job_sees_the_same_as_without_guests(lab: Lab, resized: tuple[Twins, Job]) -> None:
    twins, _ = resized
    ours, theirs = twins.outputs()
    assert ours == theirs
    assert "update 0\nreleased step 137\n" in ours
    assert "1 NODE\n1 NODE NODE NODE\n" in ours
    assert " NumNodes=1 NumCPUs" in ours, "Slurm does not make jobs larger"
    assert plain(twins.inside, "released-{id}") == plain(twins.outside, "released-{id}")


@pytest.mark.promise("resize.clean")
def test_the_released_node_serves_the_next_job_at_once(lab: Lab, resized: tuple[Twins, Job]) -> None:
    twins, waiting = resized
    assert waiting.wait() == "COMPLETED"
    assert waiting.output() == "n2\n"
    assert waiting.show()["Restarts"] == "0", "its Prolog has waited for the Epilog"
    assert held(lab, twins.inside, "n2") == ""
    assert lab.vhpc("n2", "reconcile", "--check") == []
    assert acknowledged(lab, twins.inside) == ["n2"]
    assert twins.inside.show()["JobState"] == "RUNNING"


@pytest.mark.promise("resize.clean")
def test_the_remaining_node_forgets_the_released_one(lab: Lab, resized: tuple[Twins, Job]) -> None:
    job = resized[0].inside
    lab.vhpc("n1", "reconcile", check=False)  # what the health check does at its intervals
    assert lab.vhpc("n1", "reconcile", "--check") == []
    script = (
        "for x in $(ip -o link | grep -o 'vhpcx[0-9]*'); do bridge fdb show dev $x | grep ' dst '; done;"
        "for b in $(ip -o link | grep -o 'vhpcb[0-9]*'); do ip neighbour show dev $b; done;"
        "nft list ruleset | grep 10.77.0.12"
    )
    assert lab.run("n1", "sh", "-c", script, check=False).out == ""
    let_go(lab, job)
    assert job.wait() == "COMPLETED"
    assert lab.read("alice", f"files-{job.id}") == "n1 slots=1\nn1:1\n"
    assert lab.read("alice", f"list-{job.id}") == "n1\n"
    assert " 0 received" in lab.read("alice", f"ping-{job.id}")


@pytest.mark.promise("resize.clean")
def test_a_smaller_job_ends_and_leaves_nothing(lab: Lab, resized: tuple[Twins, Job]) -> None:
    for job in resized[0]:
        let_go(lab, job)
        assert job.wait() == "COMPLETED"
    settled(lab)
    assert lab.leases() == []
    lab.assert_clean()


@pytest.mark.promise("resize.killed")
def test_an_epilog_killed_on_a_released_node_is_made_up_for(lab: Lab) -> None:
    """The job is resized from the login host, and runs on."""
    job = lab.submit("echo up; until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.2; done", *SIZE, *JOB)
    runs(lab, job)
    kill_qemu(lab, job, "n2", "STOP")
    lab.run("login", "scontrol", "update", f"JobId={job.id}", "NumNodes=1", user="alice")
    kill = ("pkill", "-KILL", "-f", "vhpc_slurm[.]hooks[.]epilog|vhpc-node-hook epilog")
    until(lambda: lab.run("n2", *kill, check=False).code == 0, "an Epilog on n2", 30)
    assert held(lab, job, "n2")
    lab.vhpc("n2", "reconcile", check=False)
    assert held(lab, job, "n2") == ""
    until(lambda: acknowledged(lab, job) == ["n2"], "the acknowledgement")
    assert lab.finish("hostname", "-w", "n2").show()["JobState"] == "COMPLETED"
    assert job.show()["JobState"] == "RUNNING"
    let_go(lab, job)
    assert job.wait() == "COMPLETED"
    settled(lab)


def test_slurm_refuses_to_make_a_job_with_guests_larger(lab: Lab) -> None:
    """As without guests: by default no job may ask for more nodes for another one."""
    job = lab.submit("sleep 60", "-w", "n1", "-H")
    done = lab.run(
        *("login", "sbatch", f"--vhpc-image={IMAGE}", f"--dependency=expand:{job.id}", "--wrap=true"),
        user="alice",
        check=False,
    )
    assert done.code != 0
    assert "Requested operation not supported on this system" in done.err
    lab.run("ctl", "scancel", str(job.id))
    settled(lab)
