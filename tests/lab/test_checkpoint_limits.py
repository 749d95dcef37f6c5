# SPDX-License-Identifier: Apache-2.0
"""Limits of the policy for checkpoints, and their removal by users."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from cluster import Job, Lab
from injection import prints
from saving import checkpoint, checkpoints_on

pytestmark = pytest.mark.lab

MIB = 1 << 20
# TOML in the words of printf(1); it permits one checkpoint of a job of 600 MiB
RULE = '\\n[[policy]]\\nname = "small"\\nmax_checkpoint_user_mib = 900\\n'
COUNT = "while true; do echo turn; sleep 1; done"


@pytest.fixture(scope="module", autouse=True)
def _checkpoints(lab: Lab) -> Iterator[None]:
    with checkpoints_on(lab, RULE):
        yield


def counting(lab: Lab, memory_mib: int) -> Job:
    """A job whose script runs."""
    job = lab.submit(COUNT, "-n1", f"--mem={memory_mib}")
    prints(job, "turn", 240)
    return job


@pytest.mark.promise("checkpoint.size")
@pytest.mark.slow
def test_a_limit_refuses_before_the_job_stops(lab: Lab) -> None:
    small, large = counting(lab, 600), counting(lab, 1000)
    done = lab.run("login", "vhpc", "checkpoint", str(large.id), user="alice", check=False)
    assert done.code == 1
    assert done.err == (
        f"vhpc: job {large.id} cannot be saved: policy rule 'small' permits 900 MiB of checkpoints for each "
        "user, and alice would have 1000 MiB with this one, which may need 1000 MiB (delete some with vhpc "
        "checkpoint rm, see: vhpc checkpoint ls)\n"
    )
    for number in range(4):
        checkpoint(lab, str(small.id), "--name", f"limit{number}")
    found = json.loads(lab.run("login", "vhpc", "checkpoint", "ls", "--json", user="alice").out)
    sizes = [one["bytes"] for one in found["checkpoints"] if one["state"] == "valid"]
    total = next(one for one in found["totals"] if one["owner"] == "user")
    assert (len(sizes), total["bytes"], total["limit_bytes"]) == (2, sum(sizes), 900 * MIB)
    names = ["limit3", "none", *(f"no-{number}" for number in range(20)), "limit2"]
    done = lab.run("login", "vhpc", "checkpoint", "rm", *names, user="alice", check=False)
    assert done.code == 1
    assert len(done.err.splitlines()) == 21
    found = json.loads(lab.run("login", "vhpc", "checkpoint", "ls", "--json", user="alice").out)
    assert (found["checkpoints"], found["totals"]) == ([], [])
    for job in (small, large):
        lab.run("ctl", "scancel", str(job.id))
        job.leave_queue()
