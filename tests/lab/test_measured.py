# SPDX-License-Identifier: Apache-2.0
"""The plan against the kernel and the guest: measured, not assumed."""

from __future__ import annotations

import re

import pytest
from cluster import Lab
from injection import until
from vcpus import THREADS

pytestmark = pytest.mark.lab


@pytest.mark.promise("place.vcpus", "place.memory", "attack.resources")
def test_vcpu_threads_and_memory_are_placed_as_planned(lab: Lab) -> None:
    job = lab.submit(
        "grep MemTotal /proc/meminfo; nproc; touch measured-$SLURM_JOB_ID;"
        " while [ -e measured-$SLURM_JOB_ID ]; do sleep 0.5; done",
        "-n2",
        "--mem=1200",
        "-w",
        "n2",
    )
    begun = ("ls", f"/home/alice/measured-{job.id}")
    until(lambda: lab.run("login", *begun, check=False).code == 0, f"job {job.id} to run", 240)
    plan = lab.vhpc("n2", "plan", str(job.id))["guests"][0]
    threads = lab.run("n2", "sh", "-c", THREADS.replace("JOB", str(job.id))).out.splitlines()
    measured = {int(m[1]): m[2] for m in (re.match(r"CPU (\d+)/\w+: (.*)", t) for t in threads) if m}
    assert measured == {pin["vcpu"]: str(pin["os_cpu"]) for pin in plan["pins"]}
    slurm = lab.run("ctl", "scontrol", "-o", "show", "job", "-d", str(job.id)).out
    assert re.search(r" CPU_IDs=0-1 Mem=1200 ", slurm), slurm
    assert sorted(measured.values()) == ["0", "1"]
    status = lab.run("n2", "sh", "-c", "cat /proc/$(pgrep -f [g]uest=vhpc)/status").out
    fields = dict(line.split(":", 1) for line in status.splitlines())
    assert fields["CapEff"].strip() == "0" * 16
    assert fields["NoNewPrivs"].strip() == "1"
    assert fields["Seccomp"].strip() == "2"
    assert 700000 <= int(fields["Uid"].split()[0]) < 701024
    lab.run("login", "rm", f"/home/alice/measured-{job.id}", user="alice")
    job.wait()
    total, count = job.output().splitlines()
    planned = plan["memory_mib"] * 1024
    assert plan["memory_mib"] == 1200 - 256
    assert planned * 0.88 < int(total.split()[1]) < planned, (
        "the kernel keeps some for itself, never finds more"
    )
    assert count == "2"
