# SPDX-License-Identifier: Apache-2.0
"""As many tasks in one guest as Slurm starts on a node by default."""

from __future__ import annotations

import pytest
from cluster import Lab

pytestmark = pytest.mark.lab

# MaxTasksPerNode in slurm.conf is 512
TASKS = 500


def test_a_step_of_500_tasks_runs_in_one_guest(lab: Lab) -> None:
    job = lab.submit(f"srun -O -n{TASKS} sh -c 'echo $SLURM_PROCID'", "-w", "n1", "-n1", "--mem=1500")
    assert job.wait("COMPLETED", "FAILED", timeout=300) == "COMPLETED"
    assert sorted(map(int, job.output().split())) == list(range(TASKS))
