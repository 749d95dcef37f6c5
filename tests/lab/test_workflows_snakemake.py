# SPDX-License-Identifier: Apache-2.0
"""Snakemake and its executor for Slurm: rules in guests; Snakemake on the login host, or in a guest."""

from __future__ import annotations

import pytest
import workflow_clients as flows
from cluster import IMAGE, Lab
from injection import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(3600)]

RUN = (
    ". ~/flows/bin/activate; cd ~/{folder}; exec snakemake --executor slurm --jobs 2 {target}"
    " --slurm-init-seconds-before-status-checks 5"
    f" --default-resources mem_mb=900 runtime=60 \"slurm_extra='--vhpc-image={IMAGE}'\""
)


@pytest.fixture(autouse=True, scope="module")
def installed(lab: Lab) -> None:
    flows.python_clients(lab)


def _total(lab: Lab, folder: str) -> None:
    total = lab.read("alice", f"{folder}/total.txt")
    flows.lines_of(lab, total)
    assert flows.accounted(lab, total) == {"COMPLETED"}


def test_snakemake_runs_rules_in_guests(lab: Lab) -> None:
    flows.workflow(lab, "snakemake-flow", "Snakefile")
    client = flows.Client(lab, RUN.format(folder="snakemake-flow", target="total"))
    assert client.end() == 0, client.said()
    _total(lab, "snakemake-flow")


@pytest.mark.promise("memory.kill")
def test_a_rule_killed_for_memory_is_tried_with_more(lab: Lab) -> None:
    flows.workflow(lab, "snakemake-eat", "Snakefile")
    client = flows.Client(lab, RUN.format(folder="snakemake-eat", target="fed.txt"))
    assert client.end() == 0, client.said()
    flows.fed(lab, lab.read("alice", "snakemake-eat/fed.txt"), "1800")


def test_snakemake_in_a_guest_submits_jobs_with_guests(lab: Lab) -> None:
    flows.workflow(lab, "snakemake-guest", "Snakefile")
    script = "exec bash -c '. ~/run-snakemake'"
    text = RUN.format(folder="snakemake-guest", target="count-0.txt")
    lab.run("login", "sh", "-c", "cat > ~/run-snakemake", user="alice", stdin=text)
    head = lab.submit(script, "-n1", "--mem=900", "-t", "60", "-w", "n1")
    assert head.wait(timeout=flows.LIMIT) == "COMPLETED", head.output()
    count = lab.read("alice", "snakemake-guest/count-0.txt")
    flows.lines_of(lab, count, counts=flows.COUNTS[:1])
    assert flows.accounted(lab, count) == {"COMPLETED"}
    assert count.split()[3] != str(head.id)


def test_an_interrupted_snakemake_leaves_no_guest(lab: Lab) -> None:
    flows.workflow(lab, "snakemake-wait", "Snakefile")
    client = flows.Client(lab, RUN.format(folder="snakemake-wait", target="waited.txt"))
    (job,) = until(lambda: flows.jobs_of_alice(lab, "RUNNING"), "a job of Snakemake", 300)
    client.interrupt()
    assert client.end(600) != 0, client.said()
    lab.quiet(300)
    assert job.accounted()[0].startswith("CANCELLED")
