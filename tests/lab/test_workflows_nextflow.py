# SPDX-License-Identifier: Apache-2.0
"""Nextflow with its executor for Slurm: processes in guests."""

from __future__ import annotations

import pytest
import workflow_clients as flows
from cluster import Lab
from injection import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(3600)]


def _start(lab: Lab, folder: str, *options: str, file: str = "count.nf") -> flows.Client:
    flows.nextflow(lab)
    flows.workflow(lab, folder, file)
    run = f"~/nextflow/bin/nextflow run {file} {' '.join(options)}"
    return flows.Client(lab, f"cd ~/{folder}; export NXF_EXECUTOR=slurm; exec {run}")


def test_nextflow_runs_its_processes_in_guests(lab: Lab) -> None:
    client = _start(lab, "nextflow-flow")
    assert client.end() == 0, client.said()
    total = lab.read("alice", "nextflow-flow/total.txt")
    flows.lines_of(lab, total)
    assert flows.accounted(lab, total) == {"COMPLETED"}


@pytest.mark.promise("memory.kill")
def test_a_process_killed_for_memory_is_tried_with_more(lab: Lab) -> None:
    client = _start(lab, "nextflow-eat", file="hungry.nf")
    assert client.end() == 0, client.said()
    assert "exit status (137)" in client.said(), client.said()
    flows.fed(lab, lab.read("alice", "nextflow-eat/fed.txt"), "2")


def test_an_interrupted_nextflow_leaves_no_guest(lab: Lab) -> None:
    client = _start(lab, "nextflow-wait", "--seconds", "3000")
    jobs = until(lambda: flows.jobs_of_alice(lab, "RUNNING"), "jobs of Nextflow", 300)
    client.interrupt()
    assert client.end(600) != 0, client.said()
    lab.quiet(300)
    assert all(job.accounted()[0].startswith("CANCELLED") for job in jobs)
