# SPDX-License-Identifier: Apache-2.0
"""dask-jobqueue in guests: scheduler, client and workers are the tasks of one step, on the job's network."""

from __future__ import annotations

import pytest
import workflow_clients as flows
from cluster import IMAGE, Lab
from injection import prints

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(3600)]

# tasks 0 and 1 are scheduler and client; each guest has a worker
OPTIONS = ("-N2", "-n4", "--mem=900", "-t", "60", "--vhpc-network=job")
STEP = "cd ~/dask-flow; srun --distribution=cyclic ~/flows/bin/python dask_count.py"


@pytest.fixture(autouse=True, scope="module")
def installed(lab: Lab) -> None:
    flows.python_clients(lab)
    flows.workflow(lab, "dask-flow", "dask_count.py")


def test_dask_computes_in_the_guests_of_a_job(lab: Lab) -> None:
    job = lab.submit(STEP, *OPTIONS)
    assert job.wait(timeout=flows.LIMIT) == "COMPLETED", job.output()
    lines = [line.split() for line in job.output().splitlines() if line.strip()]
    assert ["total", str(sum(map(int, flows.COUNTS)))] in lines, job.output()
    rows = [line for line in lines if line[-1] == f"{IMAGE}:latest"]
    assert sorted(row[0] for row in rows) == sorted(flows.COUNTS), job.output()
    assert {row[1] for row in rows} == {"n1", "n2"}, job.output()
    assert lab.run("n1", "uname", "-r").out.strip() not in {row[2] for row in rows}
    # the scheduler's address is on the job's network, and not on that of the nodes
    assert any(line[0] == "scheduler" and "tcp://10.200.0." in line[1] for line in lines), job.output()


def test_a_cancelled_dask_leaves_no_guest(lab: Lab) -> None:
    job = lab.submit(f"echo up; {STEP}", *OPTIONS)
    prints(job, "up", 300)
    lab.run("login", "scancel", str(job.id), user="alice")
    assert job.wait(timeout=300) == "CANCELLED"
    lab.quiet(300)
