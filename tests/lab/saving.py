# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on the lab: its site has a folder for them only while they are tested."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from cluster import Job, Lab
from injection import ask_again, settled

FOLDER = "/home/checkpoints"


@contextmanager
def checkpoints_on(lab: Lab, more: str = "") -> Iterator[None]:
    """The site has a folder for checkpoints, and ``more`` in vhpc.toml; those that are left are removed."""
    file, hosts = "/etc/vhpc/vhpc.toml", ("ctl", "login", *lab.nodes)
    table = f'\\n[checkpoint]\\nfolder = "{FOLDER}"\\nhold_timeout_s = 20\\n{more}'
    lab.run("n1", "install", "-d", "-m", "0700", FOLDER)
    with ExitStack() as undo:
        for host in hosts:
            lab.run(host, "cp", "-p", file, f"{file}.before")
            undo.callback(lab.run, host, "mv", f"{file}.before", file)
            lab.run(host, "sh", "-c", f"printf '{table}' >> {file}")
        lab.service("ctl", "stop", "vhpcd")
        lab.service("ctl", "start", "vhpcd")
        yield
        found = json.loads(lab.run("ctl", "vhpc", "checkpoint", "ls", "--json").out)
        names = [row["name"] for row in found["checkpoints"] if row["state"] == "valid"]
        if names:
            lab.run("ctl", "vhpc", "checkpoint", "rm", *names)
        settled(lab)
    lab.service("ctl", "stop", "vhpcd")
    lab.service("ctl", "start", "vhpcd")
    lab.run("n1", "rm", "-rf", FOLDER)


def checkpoint(lab: Lab, *words: str, user: str = "alice") -> Any:
    """Make a checkpoint; returns what the command says of it."""
    return lab.run("login", "vhpc", "checkpoint", *words, user=user, timeout=300)


def requeue(lab: Lab, job: Job, times: int = 1) -> None:
    """Save a job and put it back into the queue, for the n-th time; its next run starts soon."""
    checkpoint(lab, str(job.id), "--requeue")
    ask_again(lab, job, times)


def written(job: Job) -> list[str]:
    """The lines that the job's programs have written, without those of Slurm."""
    return [line for line in job.output().splitlines() if not line.startswith(("srun: ", "slurmstepd"))]
