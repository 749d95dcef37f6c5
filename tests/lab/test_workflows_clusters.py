# SPDX-License-Identifier: Apache-2.0
"""Programs that start and end workers as jobs, in a named cluster: the examples of docs/workflows.md."""

from __future__ import annotations

import re

import pytest
import workflow_clients as flows
import workflow_docs as docs
from cluster import Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(5400)]

GUESTS = max(docs.STAGES) + 1
# Emulated guests need minutes to import Dask.
SLOW_DASK = ("DASK_JOBQUEUE__SLURM__DEATH_TIMEOUT=1200", "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT=300")
# The same for the parts of Ray, which wait for each other.
SLOW_RAY = (
    "RAY_raylet_start_wait_time_s=600",
    "RAY_agent_register_timeout_ms=600000",
    "RAY_worker_register_timeout_seconds=600",
    "RAY_gcs_server_request_timeout_seconds=600",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S=600",
)
# The second compiler of Java costs an emulated CPU more than it gains in minutes.
SLOW_SPARK = ("JAVA_TOOL_OPTIONS=-XX:TieredStopAtLevel=1",)


@pytest.fixture(autouse=True, scope="module")
def installed(lab: Lab) -> None:
    cpus = lab.run("ctl", "sinfo", "-h", "-o", "%C").out.strip().rpartition("/")[2]
    if int(cpus) < GUESTS:
        pytest.skip(f"needs {GUESTS} CPUs, one for each guest: start the lab by `lab/vlab up --nodes 4`")
    flows.python_clients(lab)


@pytest.mark.parametrize(
    ("heading", "environment"),
    [
        ("Dask in a cluster", SLOW_DASK),
        ("Parsl in a cluster", ()),
        ("A notebook with engines", ()),
        ("Ray in a cluster", SLOW_RAY),
        ("Spark in a cluster", SLOW_SPARK),
    ],
    ids=["dask", "parsl", "ipyparallel", "ray", "spark"],
)
@pytest.mark.promise("cluster.grow")
def test_workers_come_and_go_as_jobs(lab: Lab, heading: str, environment: tuple[str, ...]) -> None:
    if heading == "Spark in a cluster":
        flows.spark(lab)
    job = docs.submit(lab, heading, environment)

    def said() -> str:
        file = f"/home/alice/{docs.FOLDER}/slurm-{job.id}.out"
        return lab.run("login", "cat", file, check=False).out

    def lines() -> list[str]:
        return re.findall(r"^(?:\d+ workers|sum \d+)$", said(), re.MULTILINE)

    def reached(workers: int) -> bool:
        assert job.queued(), said()
        return f"{workers} workers" in lines()

    killed = docs.follow(lab, reached, said)
    assert job.wait(timeout=flows.LIMIT) == "COMPLETED", said()
    right = [(f"{workers} workers", f"sum {docs.total(workers)}") for workers in (*docs.STAGES, 0)]
    assert lines() == [line for stage in right for line in stage], said()
    docs.ended(lab, killed)


@pytest.mark.promise("cluster.grow")
def test_tasks_of_nextflow_reach_a_database_by_name(lab: Lab) -> None:
    flows.nextflow(lab)
    script = docs.prepare(lab, "Nextflow with a database")
    client = flows.Client(lab, f"set -e; PATH=~/nextflow/bin:$PATH\n{script}")

    def reached(workers: int) -> bool:
        file = f"/home/alice/{docs.FOLDER}/start-{workers}"
        return lab.run("login", "test", "-e", file, check=False).code == 0

    killed = docs.follow(lab, reached, client.said)
    assert client.end() == 0, client.said()
    sums = lab.run("login", "sh", "-c", f"cat /home/alice/{docs.FOLDER}/sum-6-*").out.split()
    assert docs.total(6) in sums, sums
    docs.ended(lab, killed)
