# SPDX-License-Identifier: Apache-2.0
"""The clock of a node or of the controller is set by an hour, in either direction, while a job runs.

Only starts wait. host_clock.c says in which respects such a clock is not a real one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import IMAGE, Job, Lab
from host_clock import HostClock, host_clock
from injection import WAITING, configured, let_go, runs, said, settled, start_soon, until

pytestmark = [pytest.mark.lab, pytest.mark.slow]

HOUR_S = 3600
SIZE = ("-n1", "--mem=600")
HEALTH_CHECK = "/usr/libexec/vhpc/healthcheck"
TOLD = "compare the clocks of both hosts"


@pytest.fixture(params=["n1", "ctl"])
def clock(lab: Lab, request: pytest.FixtureRequest) -> Iterator[HostClock]:
    """The clock of a host; vhpcd requeues soon what waits for a Prolog that was never started."""
    with configured(lab, "ctl", "controller", "prolog_stuck_s = 20"), host_clock(lab, request.param) as found:
        if found.host != "ctl":  # else it has been, with all of its host
            lab.service("ctl", "restart", "vhpcd")
        yield found
    lab.service("ctl", "restart", "vhpcd")


def submitted(lab: Lab) -> Job | None:
    """A job for n1; none if the controller understands no other host."""
    options = ("--parsable", f"--vhpc-image={IMAGE}", *SIZE, "-w", "n1")
    done = lab.run("login", "sbatch", *options, user="alice", stdin="#!/bin/sh\nhostname\n", check=False)
    if done.code:
        assert "authentication" in done.err
        return None
    return Job(lab, int(done.out), "alice")


def set_right(lab: Lab, clock: HostClock) -> None:
    """As docs/install.md says: slurmctld asks no node until its clock is where it was before."""
    clock.step(0)
    if clock.host == "ctl":
        lab.service("ctl", "restart", "slurmctld")

    def answers() -> bool:
        states = [lab.node_state(node)[0] for node in lab.nodes]
        return not any(word in state for state in states for word in ("DOWN", "NOT_RESPONDING", "UNKNOWN"))

    until(answers, "the nodes to answer again", 300)
    assert lab.run("n1", "vhpc", "ps").code == 0
    assert lab.run("n1", HEALTH_CHECK, check=False).code == 0


@pytest.mark.promise("clock.step")
@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S], ids=["ahead", "behind"])
def test_a_clock_that_is_set_by_an_hour_delays_starts_only(lab: Lab, clock: HostClock, step_s: int) -> None:
    """Running jobs continue, their leases are held, and all is as before when the clock is right again.

    A slurmctld whose clock is set ahead by more than SlurmdTimeout soon takes all nodes for down and requeues
    their jobs, with and without guests: then the lease is held until the node has released the guest.
    """
    goes_on = lab.submit(WAITING, *SIZE, "-w", "n1")
    runs(lab, goes_on)
    generation = [line.split()[0] for line in lab.leases()]
    assert len(generation) == 1
    clock.step(step_s)
    assert abs(clock.ahead_s() - step_s) < HOUR_S / 4
    told = lab.run("n1", "vhpc", "ps", check=False)
    assert told.code != 0
    assert TOLD in told.err
    waits = submitted(lab)
    for _ in range(2):  # as often as vhpcd and nodes look at what is there
        assert lab.run("n1", HEALTH_CHECK, check=False).code == 0
    assert [line.split()[0] for line in lab.leases() if line.startswith(f"{goes_on.id}.0.")] == generation
    assert not any("DRAIN" in lab.node_state(node)[0] for node in lab.nodes)
    set_right(lab, clock)
    by_slurm = clock.host == "ctl" and step_s > 0 and goes_on.show()["JobState"] != "RUNNING"
    if by_slurm:
        until(lambda: not lab.leaks(), "the end of the first run", 300)
        start_soon(lab, goes_on.id)
    let_go(lab, goes_on)
    assert goes_on.wait(timeout=400) == "COMPLETED", goes_on.told()
    assert said(lab, goes_on).endswith("done\n")
    assert goes_on.show()["Restarts"] == str(int(by_slurm))
    for job in (waits or lab.submit("hostname", *SIZE, "-w", "n1"), lab.submit("hostname", *SIZE)):
        assert job.wait("COMPLETED", timeout=400) == "COMPLETED", job.told()
    settled(lab, 300)
    assert lab.leases() == []
