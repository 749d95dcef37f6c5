# SPDX-License-Identifier: Apache-2.0
"""What programs have used in guests: what they measure themselves, vhpc seff and accounting say the same."""

from __future__ import annotations

import json
import re

import pytest
from cluster import Job, Lab
from injection import until

pytestmark = pytest.mark.lab

# Burns 10 s of CPU time, holds 100 MiB, and says what its kernel says of it.
WORK = """
import os, resource
held = bytearray(b"x") * (100 << 20)
while True:
    sum(range(100_000))
    used = resource.getrusage(resource.RUSAGE_SELF)
    if used.ru_utime + used.ru_stime >= 10:
        break
print(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, flush=True)
os._exit(0)
"""
CACHE = 64 << 20
# Small pieces: the kernel refuses one that is larger than all memory, and kills nothing.
HOG = "held = []\nwhile True: held.append(bytearray(b'x') * (1 << 20))\n"


def comment(lab: Lab, job: Job) -> str:
    """AdminComment with the figures, which the last node writes at the end of its Epilog."""
    found: list[str] = []

    def has_figures() -> bool:
        said = lab.run("ctl", "sacct", "-nXP", "-o", "AdminComment", "-j", str(job.id)).out.strip()
        found[:] = [said]
        return "; usage " in said

    until(has_figures, f"the figures of job {job.id} in accounting", 120)
    return found[0]


def test_seff_and_accounting_have_what_programs_used(lab: Lab) -> None:
    script = f"cat > work.py <<'EOF'\n{WORK}EOF\nsrun -o work-%j-%t python3 work.py\nsleep 1\n"
    job = lab.finish(script, "-N2", "-n2", "--ntasks-per-node=1", "--mem=800")
    assert job.show()["JobState"] == "COMPLETED", job.told()
    rows = [job.output(f"work-{job.id}-{task}").split() for task in range(2)]
    cpu_us = sum(float(row[0]) for row in rows) * 1e6
    memory = [int(row[1]) for row in rows]
    words = comment(lab, job)
    seff = lab.run("login", "vhpc", "seff", str(job.id), "--json", user="alice")
    shown = json.loads(seff.out)
    steps = {step["step"]: step for step in shown["steps"]}
    assert set(steps) == {"batch", "0"}
    step = steps["0"]
    assert step["tasks"] == 2
    assert step["cpu_us"] == pytest.approx(cpu_us, rel=0.05)
    assert step["user_us"] + step["system_us"] == pytest.approx(step["cpu_us"], rel=0.01)
    assert step["rss_bytes"] == pytest.approx(max(memory), rel=0.05)
    # With the files of Python in the cache, and what the kernel needs for both.
    assert 0.95 * sum(memory) <= step["peak_bytes"] <= sum(memory) + 2 * CACHE
    assert step["oom_kills"] == 0
    assert step["read_bytes"] is not None
    # The script and the step together: no more than the two, and both guests have figures.
    total = shown["total"]
    assert step["cpu_us"] <= total["cpu_us"] <= 1.01 * sum(one["cpu_us"] for one in steps.values())
    assert [guest["missing"] for guest in shown["guests"]] == [None, None]
    assert (shown["cpus"], shown["memory_mib"]) == (int(job.show()["NumCPUs"]), 1600)
    expected = 100 * total["cpu_us"] / (shown["cpus"] * shown["elapsed_s"] * 1e6)
    assert shown["cpu_efficiency_percent"] == pytest.approx(expected)
    # Accounting keeps the sum behind what was there.
    pattern = r"vhpc: image \S+@sha256:[0-9a-f]{64}; usage cpu_s=(\S+) .* guests=2/2 boot_s=(\S+)"
    found = re.fullmatch(pattern, words)
    assert found is not None, words
    nodes = json.loads(lab.run("login", "vhpc", "timeline", str(job.id), "--json", user="alice").out)["nodes"]
    assert float(found[2]) == pytest.approx(max(node["ready_s"] for node in nodes), abs=0.06)
    (row,) = [row for row in lab.vhpc("ctl", "ps", "--all") if row["job"] == job.id]
    assert row["usage"] == {"cpu_us": total["cpu_us"], "peak_bytes": total["peak_bytes"]}
    assert float(found[1]) == pytest.approx(total["cpu_us"] / 1e6, abs=0.01)
    # Others do not see it.
    refused = lab.run("login", "vhpc", "seff", str(job.id), user="bob", check=False)
    assert refused.code == 1
    assert f"vhpc: vhpcd has no job {job.id} of yours" in refused.err
    lab.run("login", "sh", "-c", f"rm work.py work-{job.id}-*", user="alice")


def test_a_program_killed_for_memory_is_told(lab: Lab) -> None:
    script = f"cat > hog.py <<'EOF'\n{HOG}EOF\nsrun -e hog-%j python3 hog.py\necho went on\n"
    job = lab.finish(script, "-n1", "--mem=700", "-w", "n1")
    assert job.output().endswith("went on\n")
    lines = [line for line in job.output(f"hog-{job.id}").splitlines() if line.startswith("vhpc: ")]
    assert len(lines) == 1, lines
    assert re.match(
        rf"vhpc: step {job.id}\.0: a program in the guest of n1 was killed for memory "
        r"\(memory\.events oom_kill: [1-9]\d*\)",
        lines[0],
    )
    assert "oom_kills=" in comment(lab, job)
    shown = lab.vhpc("ctl", "seff", str(job.id))
    steps = {step["step"]: step["oom_kills"] for step in shown["steps"]}
    assert steps["0"] >= 1
    assert steps["batch"] == 0
    lab.run("login", "sh", "-c", f"rm hog.py hog-{job.id}", user="alice")


def test_a_guest_that_is_gone_has_no_figures(lab: Lab) -> None:
    job = lab.submit("touch gone-$SLURM_JOB_ID; sleep 600", "-n1", "-w", "n1")
    begun = ("ls", f"/home/alice/gone-{job.id}")
    until(lambda: lab.run("login", *begun, check=False).code == 0, f"job {job.id} to run", 240)
    lab.run("n1", "sh", "-c", "kill -9 $(pgrep -f [g]uest=vhpc)")
    job.wait()
    assert re.search(r"; usage guests=0/1 boot_s=[0-9.]+$", comment(lab, job))
    shown = lab.run("login", "vhpc", "seff", str(job.id), user="alice").out
    assert "no figures of guest 0 on n1: " in shown
    lab.run("login", "rm", f"gone-{job.id}", user="alice")
