# SPDX-License-Identifier: Apache-2.0
"""The same job twice, with a guest and without, and what it found itself to be."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import IMAGE, Job, Lab
from injection import output_meets

from pace import limit

WHERE = "/home/alice/same"
SOURCES = Path(__file__).with_name("same")

# Files next to the probe: a task's prolog, and programs that cannot be found or run as they are.
FILES = {
    "probe.py": (SOURCES / "probe.py").read_text(),
    "task-prolog": "\n".join(
        [
            "#!/bin/sh",
            "echo 'export FROM_TASK_PROLOG=a  b=c'",
            "echo unset LANG",
            "echo print said by the task prolog",
            "",
        ]
    ),
    "arg0": '#!/bin/sh\necho "arg0 is $0, $# more: $1,$2"\n',
    "catch.py": (SOURCES / "catch.py").read_text(),
    "bad-interpreter": "#!/no/such/thing\n",
}


@dataclass(frozen=True)
class Twins:
    """A job in a guest and the same job without."""

    inside: Job
    outside: Job

    def __iter__(self) -> Any:
        return iter((self.inside, self.outside))

    def wait(self) -> Twins:
        """Wait for both to end; guests on a busy machine take minutes for what takes seconds without."""
        for job in self:
            job.wait(timeout=400)
        return self

    def outputs(self, name: str = "slurm-{id}.out") -> tuple[str, str]:
        """The same file of both, ids and node names made alike."""
        return plain(self.inside, name), plain(self.outside, name)

    def found(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The findings of a probe of this name in both."""
        first, second = (json.loads(job.output(f"same/{job.id}.{name}")) for job in self)
        return first, second


def plain(job: Job, name: str) -> str:
    """A file of a job with what differs by nature made alike."""
    text = job.output(name)
    text = re.sub(r" AT \d{4}-\S+ ", " AT TIME ", text).replace(f"-{job.id}-", "-ID-")
    # what slurmstepd says begins with its name before Slurm 25.11, and with the time since
    text = re.sub(
        r"^(?:\[\d{4}-\d\d-\d\dT[\d:.]+\]|slurmstepd-n\d:) (?=error:)", "slurmstepd: ", text, flags=re.M
    )
    for node in ("n1", "n2"):
        text = text.replace(node, "NODE")
    return (
        text.replace(f"job{job.id:05}", "jobID").replace(f"{job.id}.", "ID.").replace(f" {job.id} ", " ID ")
    )


@contextmanager
def nodes_in_zone(lab: Lab, zone: Path) -> Iterator[None]:
    """Nodes in a time zone by a copy of its file; images that have the zone are not likely to be in it."""
    for node in lab.nodes:
        lab.run(node, "sh", "-c", "mv /etc/localtime /etc/localtime.before", check=False)
        copy = "import sys; open('/etc/localtime', 'wb').write(bytes.fromhex(sys.stdin.read()))"
        lab.run(node, "python3", "-c", copy, stdin=zone.read_bytes().hex())
    try:
        yield
    finally:
        for node in lab.nodes:
            lab.run(
                node, "sh", "-c", "rm /etc/localtime; mv /etc/localtime.before /etc/localtime", check=False
            )


def sections(text: str) -> dict[str, str]:
    """Parts of an output by the names of the lines ``== NAME`` before them."""
    parts = re.split(r"^== (\S+)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def submit(lab: Lab, script: str, *options: str, before: str = "") -> Twins:
    """Submit a script twice from the folder of the probe; `before` is said in the submitting shell."""
    jobs = []
    for image in ([f"--vhpc-image={IMAGE}"], []):
        words = " ".join([*image, *options])
        done = lab.run(
            "login",
            "bash",
            "-c",
            f"cd {WHERE} && {before or ':'} && "
            f"exec sbatch --parsable -t 60 -o /home/alice/slurm-%j.out {words}",
            user="alice",
            stdin=f"#!/bin/bash\n{script}\n",
        )
        jobs.append(Job(lab, int(done.out.strip()), "alice"))
    return Twins(*jobs)


def until(
    condition: Callable[[], object], what: str, timeout: float = 180, instead: Callable[[], str] = lambda: ""
) -> None:
    """Wait for a condition; `instead` tells, when it does not come, what there is."""
    end = time.monotonic() + limit(timeout)
    while not condition():
        assert time.monotonic() < end, f"waited {timeout:g} s in vain for: {what} {instead()}"
        time.sleep(0.2)


def says(job: Job, line: str, name: str = "slurm-{id}.out", timeout: float = 240) -> None:
    """Wait for a whole line in a file of the job's user."""
    output_meets(job, lambda text: line in text.splitlines(), f"{line!r} of job {job.id}", timeout, name)
