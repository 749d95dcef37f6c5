# SPDX-License-Identifier: Apache-2.0
"""A node that no other host reaches: at the ready barrier, and while its job runs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from cluster import Lab
from injection import (
    ask_again,
    kill_qemu,
    ours,
    paused,
    runs,
    settled,
    silent_nodes_are_down,
    unplugged,
    until,
    waits,
)

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(900)]

NETWORK = "--vhpc-network=job"


@pytest.fixture
def impatient(lab: Lab) -> Iterator[None]:
    with silent_nodes_are_down(lab):
        yield


@pytest.mark.promise("net.barrier-fails")
def test_a_node_unplugged_at_the_barrier_is_named(lab: Lab) -> None:
    """The other node waits `network.ready_timeout_s`, and no node is drained."""
    job = lab.submit("echo up", "-N2", "--no-requeue", NETWORK)
    paused(lab, job, "n2")
    waits(lab, job, "n1")
    with unplugged(lab, "n2"):
        kill_qemu(lab, job, "n2", "CONT")
        until(
            lambda: (
                "status=failed" in lab.run("n1", "cat", f"/run/vhpc/jobs/{job.id}/state", check=False).out
            ),
            "n1 to stop waiting",
            180,
        )
        told = lab.run("n1", "cat", f"/run/vhpc/jobs/{job.id}/state").out
    assert "node n2" in told, told
    assert job.wait(timeout=300) == "FAILED"
    (line,) = ours(job.output())
    assert re.search(r"the guests of node n2 are not ready", line), line
    assert "up" not in job.output().splitlines()
    settled(lab, 300)


@pytest.mark.promise("slurm.node-lost")
@pytest.mark.usefixtures("impatient")
def test_a_job_whose_node_is_unplugged_ends_and_leaves_nothing(lab: Lab) -> None:
    """Slurm takes the node for down and ends the job; the node learns that when it is back."""
    script = "srun -N2 -n2 sh -c 'echo up; sleep 1000'"
    job = lab.submit(script, "-N2", "--no-requeue", NETWORK)
    runs(lab, job, 2)
    with unplugged(lab, "n2"):
        until(lambda: "DOWN" in lab.node_state("n2")[0], "slurmctld to miss the node", 180)
        assert job.wait(timeout=60) == "NODE_FAIL"
        until(lambda: not lab.run("n1", "virsh", "-q", "list", "--name").out.strip(), "n1 to be free", 120)
    until(lambda: "DOWN" not in lab.node_state("n2")[0], "the node to be back", 120)
    settled(lab, 300)
    assert "vhpc" not in lab.node_state("n2")[1]


@pytest.mark.promise("slurm.node-requeue")
@pytest.mark.usefixtures("impatient")
def test_a_job_whose_node_is_unplugged_runs_again(lab: Lab) -> None:
    """Slurm requeues it while its first guest is still on the node, which cannot be told to end it."""
    first = "srun -N2 -n2 sh -c 'echo up; sleep 1000'; exit 1"
    again = "srun -N2 -n2 hostname | sort; ping -c1 -W1 n2 | grep -c ' 0% '"
    job = lab.submit(
        f'[ "${{SLURM_RESTART_COUNT:-0}}" != 0 ] || {{ {first}; }}\n{again}', "-N2", "--requeue", NETWORK
    )
    runs(lab, job, 2)
    with unplugged(lab, "n2"):
        until(lambda: job.show()["Restarts"] == "1", "the job to be requeued", 180)
        assert lab.run("n2", "virsh", "-q", "list", "--name").out.strip(), "the guest runs on its own"
        until(lambda: not lab.run("n1", "virsh", "-q", "list", "--name").out.strip(), "n1 to be free", 120)
    until(lambda: "DOWN" not in lab.node_state("n2")[0], "the node to be back", 120)
    until(lambda: not lab.run("n2", "virsh", "-q", "list", "--name").out.strip(), "n2 to be free", 120)
    ask_again(lab, job)
    assert job.wait(timeout=300) == "COMPLETED"
    assert job.output() == "n1\nn2\n1\n"
    settled(lab, 300)
    assert "vhpc" not in lab.node_state("n2")[1]
