# SPDX-License-Identifier: Apache-2.0
"""A program for the host of slurmctld: what pyslurm says of jobs, and where scontrol says otherwise.

``python - same JOBID…`` prints JSON: the versions, the fields that differ, and
which jobs pyslurm itself has read.  ``python - hang JOBID`` stops slurmctld and
prints how long a question takes and how long other threads stood still, in
seconds.  ``python - list`` prints the jobs that pyslurm lists, or the error.
Exit status 3: pyslurm cannot be used here.  With ``--bin FOLDER`` Slurm's
commands are there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

from msgspec import structs

from vhpc_slurm.config import load
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.slurm.port import NoSuchJobError, SlurmError
from vhpc_slurm.slurm.pyslurm_adapter import PySlurm
from vhpc_slurm.slurm.pyslurm_client import UnusableError
from vhpc_slurm.slurm.scontrol import Scontrol


class Watched(PySlurm):
    """Notes which jobs are left to scontrol altogether."""

    own: bool

    def _prove(self, job: Any, kinds: set[str]) -> Any:
        self.own = True
        return job  # compared below


def same(folder: str, jobs: list[int]) -> dict[str, Any]:
    """Compare both adapters' answers on these jobs and on the list of jobs."""
    commands, pyslurm = Scontrol(folder), Watched(folder)
    report: dict[str, Any] = {"versions": str(pyslurm._usable()), "differences": [], "read": []}
    listed = set(commands.jobs()) ^ set(pyslurm.jobs())
    report["differences"] += [f"listed by one: {job}" for job in sorted(listed, key=str)]
    for job_id in jobs:
        answers = []
        pyslurm.own = False
        for adapter in (commands, pyslurm):
            try:
                answers.append(structs.asdict(adapter.load(job_id)))
            except NoSuchJobError:
                answers.append({"job_id": "none"})
            except VhpcError as err:
                answers.append({"job_id": err.line()})
        if pyslurm.own:
            report["read"].append(job_id)
        report["differences"] += [
            f"job {job_id}: {name}: scontrol {value!r}, pyslurm {answers[1].get(name)!r}"
            for name, value in answers[0].items()
            if answers[1].get(name) != value
        ]
    pyslurm.close()
    return report


def hang(folder: str, job_id: int) -> dict[str, Any]:
    """Ask while slurmctld is stopped; slurmctld always continues afterwards."""
    pyslurm = PySlurm(folder)
    pyslurm.load(job_id)
    found: dict[str, Any] = {}

    def ask() -> None:
        began = time.monotonic()
        try:
            pyslurm.load(job_id)
        except SlurmError as err:
            found["error"] = err.line()
        found["took"] = time.monotonic() - began

    subprocess.run(["pkill", "-STOP", "-x", "slurmctld"], check=True)
    try:
        thread = threading.Thread(target=ask)
        last, still = time.monotonic(), 0.0
        thread.start()
        while thread.is_alive():
            time.sleep(0.01)
            now = time.monotonic()
            last, still = now, max(still, now - last)
    finally:
        subprocess.run(["pkill", "-CONT", "-x", "slurmctld"], check=True)
    found["still"] = still
    found["after"] = pyslurm.load(job_id).job_id
    pyslurm.close()
    return found


def main() -> int:
    words = sys.argv[1:]
    if words[:1] == ["--bin"]:
        folder, words = words[1], words[2:]
    else:
        folder = load().controller.slurm_bin
    try:
        match words[0]:
            case "same":
                print(json.dumps(same(folder, [int(word) for word in words[1:]])))
            case "hang":
                print(json.dumps(hang(folder, int(words[1]))))
            case "list":
                print(json.dumps([job.job_id for job in PySlurm(folder).jobs()]))
    except UnusableError as err:
        print(err.line())
        return 3
    except VhpcError as err:
        print(err.line())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
