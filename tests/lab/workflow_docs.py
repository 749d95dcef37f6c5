# SPDX-License-Identifier: Apache-2.0
"""Examples of docs/workflows.md, run as they are there: their files, and their commands on the login host."""

from __future__ import annotations

import re

import workflow_clients as flows
from cluster import ROOT, Job, Lab
from injection import kill_qemu, until

COMMON = "Workers that come and go"
STAGES = (1, 4, 2, 6)
"""Workers of each example, one after another."""
KILLED_AT = 4


def example(heading: str) -> tuple[dict[str, str], list[str]]:
    """Files (``$ cat NAME``) and commands of a section, up to the next heading."""
    text = (ROOT / "docs/workflows.md").read_text()
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ [A-Z]|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/workflows.md has no section {heading}"
    files, commands = {}, []
    for block in re.findall(r"^```\n(.*?)^```$", found[1], re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, rest = part.partition("\n")
            if command.startswith("cat "):
                files[command.removeprefix("cat ")] = rest
            else:
                commands.append(command)
    return files, commands


def start(lab: Lab, heading: str, folder: str, environment: tuple[str, ...] = ()) -> list[Job]:
    """Write the files of a section and of the common part, and run its commands; returns the jobs."""
    files, commands = example(heading)
    files |= example(COMMON)[0]
    lab.run("login", "sh", "-c", f"rm -rf ~/{folder}; mkdir ~/{folder}", user="alice")
    for name, text in files.items():
        lab.run("login", "sh", "-c", f"cat > ~/{folder}/{name}", user="alice", stdin=text)
    script = "\n".join((f"cd ~/{folder}", *commands))
    done = lab.run("login", "env", *environment, "sh", "-ec", script, user="alice")
    return [
        Job(lab, int(number), "alice")
        for number in re.findall(r"^Submitted batch job (\d+)$", done.out, re.M)
    ]


def output(lab: Lab, job: Job, folder: str) -> list[str]:
    """Lines that tell the stages of an example: "4 workers" and "sum 21325334000"."""
    text = lab.run("login", "cat", f"/home/alice/{folder}/slurm-{job.id}.out", check=False).out
    return re.findall(r"^(?:\d+ workers|sum \d+)$", text, re.MULTILINE)


def right_lines() -> list[str]:
    """The lines of a run without a mistake: n² for all n < N has the sum (N - 1) N (2N - 1) / 6."""
    tops = [1000 * workers for workers in STAGES]
    sums = [(top - 1) * top * (2 * top - 1) // 6 for top in tops]
    rows = [(f"{workers} workers", f"sum {total}") for workers, total in zip(STAGES, sums, strict=True)]
    return [line for row in rows for line in row] + ["0 workers", "sum 0"]


def grows_and_shrinks(lab: Lab, job: Job, folder: str) -> None:
    """Follow an example through its stages; kills its newest worker once."""
    killed = None
    for workers in STAGES:
        line = f"{workers} workers"
        until(lambda line=line: line in output(lab, job, folder) or not job.queued(), line, flows.LIMIT)
        assert line in output(lab, job, folder), told(lab, job, folder)
        # Slurm sees the same number of workers as the example does
        running = until(lambda number=workers + 1: _running(lab, number), f"{line} in Slurm", 30)
        if workers == KILLED_AT:
            killed = max(running, key=lambda each: each.id)
            kill_qemu(lab, killed, killed.show()["NodeList"])
    assert killed is not None
    assert job.wait(timeout=flows.LIMIT) == "COMPLETED", told(lab, job, folder)
    assert output(lab, job, folder) == right_lines(), told(lab, job, folder)
    assert killed.accounted()[0] != "COMPLETED"
    lab.quiet(300)
    assert lab.vhpc("ctl", "cluster", "ls", "--all") == []


def told(lab: Lab, job: Job, folder: str) -> str:
    """The output of an example's first job, for a test that has failed."""
    return lab.run("login", "cat", f"/home/alice/{folder}/slurm-{job.id}.out", check=False).out


def _running(lab: Lab, number: int) -> list[Job] | None:
    """The user's running jobs, if there are so many."""
    jobs = flows.jobs_of_alice(lab, "RUNNING")
    return jobs if len(jobs) == number else None
