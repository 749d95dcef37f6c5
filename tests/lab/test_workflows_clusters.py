# SPDX-License-Identifier: Apache-2.0
"""Programs that start and end workers as jobs, in a named cluster: the examples of docs/workflows.md."""

from __future__ import annotations

import pytest
import workflow_clients as flows
import workflow_docs as docs
from cluster import Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(5400)]

GUESTS = max(docs.STAGES) + 1
# Emulated guests need minutes to import Dask.
SLOW_DASK = ("DASK_JOBQUEUE__SLURM__DEATH_TIMEOUT=1200", "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT=300")


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
    ],
    ids=["dask", "parsl", "ipyparallel"],
)
@pytest.mark.promise("cluster.grow")
def test_workers_come_and_go_as_jobs(lab: Lab, heading: str, environment: tuple[str, ...]) -> None:
    [job] = docs.start(lab, heading, "elastic", environment)
    docs.grows_and_shrinks(lab, job, "elastic")
