# SPDX-License-Identifier: Apache-2.0
"""A site whose Slurm requeues every batch job after a failed Prolog, also those with --no-requeue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import IMAGE, Lab
from injection import ask_again, one_line, requeued, settled, slurm_conf, until

pytestmark = [pytest.mark.lab, pytest.mark.slow]

# nohold_on_prolog_fail: nothing but vhpc stops a job that would fail again and again
SETTINGS = "s/^PrologFlags=.*/&,ForceRequeueOnFail/; s/^SchedulerParameters=.*/&,nohold_on_prolog_fail/"
MISTAKE = "no-such-image"


@pytest.fixture(scope="module", autouse=True)
def _forced(lab: Lab) -> Iterator[None]:
    with slurm_conf(lab, SETTINGS):
        assert "ForceRequeueOnFail" in lab.run("ctl", "scontrol", "show", "config").out
        yield


@pytest.fixture
def broken(lab: Lab, no_health_check: str) -> Iterator[None]:
    """The node n1 cannot start guests, and its Prolog fails."""
    lab.service("n1", "kill", "libvirtd")
    yield
    lab.service("n1", "start", "libvirtd")
    lab.resume("n1", check=False)


def drained(lab: Lab) -> None:
    """The node of the failed Prolog is drained, with vhpc's reason; no other one is."""
    until(lambda: "DRAIN" in lab.node_state("n1")[0], "the node to be drained")
    assert "vhpc: cannot connect to libvirt" in lab.node_state("n1")[1]
    assert "DRAIN" not in lab.node_state("n2")[0]


@pytest.mark.promise("job.one-line")
@pytest.mark.parametrize("options", [(), ("--no-requeue",)], ids=["requeue", "no-requeue"])
def test_a_users_mistake_fails_the_job_once(lab: Lab, options: tuple[str, ...]) -> None:
    job = lab.finish("echo ran", *options, image=MISTAKE)
    one_line(job, MISTAKE)
    assert "ran" not in job.output().split()
    assert job.show()["Restarts"] == "0"
    assert job.accounted() == ["FAILED", "1:0"]
    settled(lab)


@pytest.mark.promise("job.one-line")
@pytest.mark.parametrize("command", [("srun", "true"), ("salloc", "srun", "true")], ids=" ".join)
def test_a_mistake_in_an_interactive_job_ends_it(lab: Lab, command: tuple[str, ...]) -> None:
    first, *rest = command
    done = lab.run("login", first, f"--vhpc-image={MISTAKE}", *rest, user="alice", check=False)
    assert done.code != 0
    assert MISTAKE in done.err
    settled(lab)


@pytest.mark.promise("libvirt.down")
@pytest.mark.parametrize("size", [("-w", "n1"), ("-N2",)], ids=["one", "two"])
def test_a_bad_node_requeues_also_with_no_requeue(lab: Lab, broken: None, size: tuple[str, ...]) -> None:
    job = lab.submit("srun hostname | sort", "--no-requeue", "--vhpc-network=job", *size)
    drained(lab)
    until(lambda: requeued(job), "the job to be requeued")
    show = job.show()
    assert (show["JobState"], show["Restarts"]) == ("PENDING", "1")
    lab.service("n1", "start", "libvirtd")
    lab.resume("n1")
    ask_again(lab, job)
    assert job.wait(timeout=300) == "COMPLETED"
    assert job.show()["Restarts"] == "1"
    assert job.output() == ("n1\nn2\n" if "-N2" in size else "n1\n")
    settled(lab)


@pytest.mark.promise("libvirt.down")
@pytest.mark.parametrize("command", ["srun", "salloc"])
def test_a_bad_node_ends_an_interactive_job(lab: Lab, broken: None, command: str) -> None:
    options = (f"--vhpc-image={IMAGE}", "-w", "n1", "--job-name=bad")
    done = lab.run("login", command, *options, "hostname", user="alice", check=False)
    assert done.code != 0
    assert "n1\n" not in done.out
    drained(lab)
    lab.quiet()


def test_a_requeue_of_vhpc_heeds_no_requeue(lab: Lab) -> None:
    """Its Prolog does not fail: the node is not at fault."""
    lab.service("ctl", "stop", "vhpcd")
    try:
        job = lab.finish("hostname", "--no-requeue")
    finally:
        lab.service("ctl", "start", "vhpcd")
    assert job.show()["Restarts"] == "0"
    settled(lab)
