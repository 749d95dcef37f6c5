# SPDX-License-Identifier: Apache-2.0
"""Examples of docs/workflows.md, run as they are there: their files, and their commands on the login host."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import workflow_clients as flows
from cluster import ROOT, Job, Lab
from injection import kill_qemu, until

COMMON = "Workers that come and go"
STAGES = (1, 4, 2, 6)
"""Workers of each example, one after another."""
KILLED_AT = 4
FOLDER = "elastic"
"""Folder of the example in the user's home."""


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


def prepare(lab: Lab, heading: str) -> str:
    """Write the files of a section and of the common part; returns a script of its commands."""
    files, commands = example(heading)
    files |= example(COMMON)[0]
    lab.run("login", "sh", "-c", f"rm -rf ~/{FOLDER}; mkdir ~/{FOLDER}", user="alice")
    for name, text in files.items():
        lab.run("login", "sh", "-c", f"cat > ~/{FOLDER}/{name}", user="alice", stdin=text)
    return "\n".join((f"cd ~/{FOLDER}", *commands))


def submit(lab: Lab, heading: str, environment: tuple[str, ...] = ()) -> Job:
    """Run a section whose only command submits a job."""
    script = prepare(lab, heading)
    done = lab.run("login", "env", *environment, "sh", "-ec", script, user="alice")
    return Job(lab, int(done.out.removeprefix("Submitted batch job ")), "alice")


def follow(lab: Lab, reached: Callable[[int], bool], said: Callable[[], str]) -> Job:
    """Follow an example through its stages; kills its newest worker once, and returns its job."""
    killed = None
    for workers in STAGES:
        stage = f"{workers} workers"
        until(partial(reached, workers), stage, flows.LIMIT)
        # Slurm sees the same number of workers as the example does
        running = until(partial(_running, lab, workers + 1), f"{stage} in Slurm: {said()}", 30)
        if workers == KILLED_AT:
            killed = max(running, key=lambda job: job.id)
            kill_qemu(lab, killed, killed.show()["NodeList"])
    assert killed is not None
    return killed


def _running(lab: Lab, number: int) -> list[Job]:
    """The user's running jobs, if there are so many; otherwise none."""
    jobs = flows.jobs_of_alice(lab, "RUNNING")
    return jobs if len(jobs) == number else []


def ended(lab: Lab, killed: Job) -> None:
    """No job, guest or cluster is left, and the killed worker has failed."""
    assert killed.accounted()[0] != "COMPLETED"
    lab.quiet(300)
    assert lab.vhpc("ctl", "cluster", "ls", "--all") == []


def total(workers: int) -> str:
    """The sum of the results of so many tasks: n² for all n < N has the sum (N - 1) N (2N - 1) / 6."""
    top = 1000 * workers
    return str((top - 1) * top * (2 * top - 1) // 6 if workers else 0)
