# SPDX-License-Identifier: Apache-2.0
"""Usage of programs in guests: their own measurement, vhpc seff and accounting agree."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from cluster import Job, Lab
from injection import until

from pace import PACE

pytestmark = pytest.mark.lab
UNSEEN_US = 0.3e6 * PACE
"""An emulated CPU that waits for the host is CPU time of its guest, also after the program's last look."""

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
# Reads and writes files of home, or burns 5 s of CPU time and then waits for a file; says what it has used.
SHARES = """
import os, resource, sys, time
what, job = sys.argv[1:]
if what == "files":
    with open(f"input-{job}", "rb", buffering=0) as file:
        read = sum(len(block) for block in iter(lambda: file.read(1 << 20), b""))
    with open(f"output-{job}", "wb", buffering=0) as file:
        written = sum(file.write(bytes(1 << 20)) for _ in range(24))
else:
    read = written = 0
    while time.process_time() < 5:
        sum(range(100_000))
used = resource.getrusage(resource.RUSAGE_SELF)
with open(f"said-{what}-{job}.part", "w") as file:
    print(used.ru_utime + used.ru_stime, read, written, file=file)
os.rename(f"said-{what}-{job}.part", f"said-{what}-{job}")
while what == "burn" and not os.path.exists(f"go-{job}"):
    time.sleep(1)
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


@pytest.mark.promise("usage.seff")
def test_seff_and_accounting_have_the_usage_of_programs(lab: Lab) -> None:
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
    used = {"cpu_us": total["cpu_us"], "peak_bytes": total["peak_bytes"], "so_far": None}
    assert row["usage"] == used
    assert float(found[1]) == pytest.approx(total["cpu_us"] / 1e6, abs=0.01)
    # Others do not see it.
    refused = lab.run("login", "vhpc", "seff", str(job.id), user="bob", check=False)
    assert refused.code == 1
    assert f"vhpc: vhpcd has no job {job.id} of yours" in refused.err
    lab.run("login", "sh", "-c", f"rm work.py work-{job.id}-*", user="alice")


def seff_of(lab: Lab, job: Job) -> dict[str, Any]:
    """The output of vhpc seff for the job's owner; empty while there are no figures."""
    done = lab.run("login", "vhpc", "seff", str(job.id), "--json", user=job.user, check=False)
    found: dict[str, Any] = json.loads(done.out) if done.code == 0 else {}
    return found


@pytest.mark.promise("usage.running", "usage.files")
def test_a_running_job_shows_its_usage_so_far(lab: Lab) -> None:
    """A step has ended, one runs; Slurm's own health check tells of them."""
    more = 1 << 20  # the script's own files in home, and what virtiofsd reads for itself
    script = (
        f"cat > shares-$SLURM_JOB_ID.py <<'EOF'\n{SHARES}EOF\n"
        "head -c 16777216 /dev/zero > input-$SLURM_JOB_ID\n"
        "srun python3 shares-$SLURM_JOB_ID.py files $SLURM_JOB_ID\n"
        "srun python3 shares-$SLURM_JOB_ID.py burn $SLURM_JOB_ID\n"
    )
    job = lab.submit(script, "-n1", "--mem=800", "-w", "n1")
    burnt = ("cat", f"/home/alice/said-burn-{job.id}")
    until(
        lambda: lab.run("login", *burnt, check=False).code == 0, f"job {job.id} to have burnt CPU time", 300
    )
    files_s, read, written = (float(word) for word in job.output(f"said-files-{job.id}").split())
    burn_s = float(job.output(f"said-burn-{job.id}").split()[0])
    assert (read, written) == (16 << 20, 24 << 20)
    written += 16 << 20  # by the script

    def burnt_so_far() -> dict[str, Any]:
        found = seff_of(lab, job)
        steps = {step["step"]: step["cpu_us"] for step in found.get("steps", ())}
        return found if steps.get("1", 0) >= 0.95e6 * burn_s else {}

    shown = until(burnt_so_far, f"the next health check to tell of job {job.id}", 240)
    assert shown["state"] == "RUNNING"
    assert 0 <= shown["so_far"]["age_s"] < 180
    assert shown["nodes_reported"] == 0
    steps = {step["step"]: step for step in shown["steps"]}
    assert set(steps) == {"batch", "0", "1"}
    assert steps["0"]["cpu_us"] == pytest.approx(files_s * 1e6, rel=0.05, abs=UNSEEN_US)
    assert steps["1"]["cpu_us"] <= 1.5e6 * burn_s + 1e6
    assert (steps["1"]["tasks"], steps["1"]["rss_bytes"]) == (1, None)
    assert written <= shown["shared_folders"]["written_bytes"] < written + more
    # The guest may have the script's output in memory.
    assert shown["shared_folders"]["read_bytes"] < read + more
    (guest,) = shown["guests"]
    assert guest["shared_folders"] == shown["shared_folders"]
    text = lab.run("login", "vhpc", "seff", str(job.id), user="alice").out
    assert re.search(r"^Figures +so far, \S+ ago$", text, re.M), text
    rows = json.loads(lab.run("login", "vhpc", "ps", "--json", user="alice").out)
    (row,) = [one for one in rows if one["job"] == job.id]
    assert row["usage"]["cpu_us"] >= 0.95e6 * burn_s
    assert row["usage"]["so_far"]["age_s"] >= 0
    usage = json.loads(lab.run("login", "vhpc", "report", str(job.id), "--json", user="alice").out)["usage"]
    assert usage["so_far"]["age_s"] >= 0
    assert "of yours" in lab.run("login", "vhpc", "seff", str(job.id), user="bob", check=False).err

    lab.run("login", "touch", f"go-{job.id}", user="alice")
    job.wait()
    assert job.show()["JobState"] == "COMPLETED", job.told()
    words = comment(lab, job)
    ended = seff_of(lab, job)
    assert (ended["so_far"], ended["nodes_reported"]) == (None, 1)
    total, steps = ended["total"], {step["step"]: step for step in ended["steps"]}
    assert steps["1"]["cpu_us"] <= total["cpu_us"] <= 1.01 * sum(one["cpu_us"] for one in steps.values())
    assert shown["total"]["cpu_us"] <= total["cpu_us"] <= shown["total"]["cpu_us"] + 5e6
    assert written <= ended["shared_folders"]["written_bytes"] < written + more
    assert f" shared_written_bytes={ended['shared_folders']['written_bytes']} " in words
    lab.run("login", "sh", "-c", f"rm *-{job.id} shares-{job.id}.py", user="alice")


def test_bytes_read_from_home_are_counted(lab: Lab) -> None:
    """A file that no guest has in memory: the login host has written it."""
    lab.run("login", "sh", "-c", "head -c 16777216 /dev/urandom > input", user="alice")
    job = lab.finish("cat input > /dev/null; cat input | wc -c", "-n1", "--mem=800", "-w", "n1")
    assert job.output() == f"{16 << 20}\n"
    comment(lab, job)
    shared = seff_of(lab, job)["shared_folders"]
    # Once or twice: whether the guest still had it in memory.
    assert 16 << 20 <= shared["read_bytes"] < (32 << 20) + (1 << 20)
    assert shared["written_bytes"] < 1 << 20
    lab.run("login", "rm", "input", user="alice")


@pytest.mark.promise("usage.oom")
def test_a_program_killed_for_memory_is_reported(lab: Lab) -> None:
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


@pytest.mark.promise("usage.seff")
def test_a_lost_guest_has_no_figures(lab: Lab) -> None:
    job = lab.submit("touch gone-$SLURM_JOB_ID; sleep 600", "-n1", "-w", "n1")
    begun = ("ls", f"/home/alice/gone-{job.id}")
    until(lambda: lab.run("login", *begun, check=False).code == 0, f"job {job.id} to run", 240)
    lab.run("n1", "sh", "-c", "kill -9 $(pgrep -f [g]uest=vhpc)")
    job.wait()
    assert re.search(r"; usage guests=0/1 boot_s=[0-9.]+$", comment(lab, job))
    shown = lab.run("login", "vhpc", "seff", str(job.id), user="alice").out
    assert "no figures of guest 0 on n1: " in shown
    lab.run("login", "rm", f"gone-{job.id}", user="alice")
