# SPDX-License-Identifier: Apache-2.0
"""A site with a pyslurm and Slurm's commands that print what Slurm 26.05 printed (data/scontrol)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import fake_pyslurm
import pytest
from doctor_rig import executable

from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.slurm.port import SlurmJob
from vhpc_slurm.slurm.pyslurm_adapter import PySlurm
from vhpc_slurm.slurm.scontrol import Scontrol

DATA = Path(__file__).parents[2] / "data" / "scontrol" / "26.05"
VERSION = "25.11.4"
Adapter = Literal["scontrol", "pyslurm", "auto"]
# As pyslurm gives the job of two-merged.txt: n[1-2], CPU_IDs=8-9, GRES=gpu:h200:2(IDX:0-1),ibvf(CNT:2)
GRES = {"gpu:h200": {"count": 2, "indexes": "0-1"}, "ibvf:CNT": 2}
JOB: dict[str, Any] = {
    "id": 2,
    "requeue_count": 0,
    "state": "RUNNING",
    "state_reason": "Prolog",
    "user_id": 2001,
    "group_id": 2001,
    "user_name": "alice",
    "partition": "all",
    "name": "j.sh",
    "working_directory": "/home/alice",
    "constraints": "",
    "account": "",
    "qos": "",
    "batch_host": "n1",
    "is_batch_job": True,
    "heterogeneous_id": 0,
    "array_tasks_waiting": "",
    "cpus": 4,
    "allocated_nodes": "n[1-2]",
    "start_time": 1795200523,
}
LAYOUT = {"n1": ["8-9", 1024, GRES], "n2": ["8-9", 1024, GRES]}
NODES = {"n1": [2, 8, 1], "n2": [2, 8, 1]}
SCONTROL = """here=$(dirname "$0")
echo "$*" >> "$here/calls"
case "$*" in
"show config") printf 'SLURM_VERSION = %s\\nPrivateData = none\\nBOOT_TIME = x\\n' "$(cat "$here/version")";;
"-o show job -d 2") cat "$here/job";;
*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
esac"""


class Site:
    """Slurm's commands that print what was captured, and a pyslurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        executable(folder / "scontrol", SCONTROL)
        executable(folder / "squeue", "echo '2 RUNNING 0 1795200523 Prolog'")
        (folder / "version").write_text(VERSION)
        (folder / "job").write_text((DATA / "two-merged.txt").read_text())
        self.package = fake_pyslurm.install(
            folder / "site",
            version="25.11.2",
            built="25.11.1",
            jobs={"2": JOB},
            layouts={"2": LAYOUT},
            nodes=NODES,
        )
        self._open: list[PySlurm] = []

    def change(self, **scenario: Any) -> None:
        fake_pyslurm.change(self.package, **scenario)

    def job(self, **fields: Any) -> None:
        self.change(jobs={"2": JOB | fields})

    def scontrol_says(self, *replaced: tuple[str, str]) -> None:
        text = (DATA / "two-merged.txt").read_text()
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        (self.folder / "job").write_bytes(text.encode("latin-1"))

    def connect(self, **options: Any) -> PySlurm:
        found = PySlurm(str(self.folder), **options)
        self._open.append(found)
        return found

    def config(self, adapter: Adapter) -> Config:
        return Config(controller=Controller(slurm_bin=str(self.folder), slurm_adapter=adapter))

    def expected(self) -> SlurmJob:
        return Scontrol(str(self.folder)).load(2)

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def pid(self) -> int:
        return int((self.package / "pid").read_text())

    def close(self) -> None:
        for found in self._open:
            found.close()


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """For a fixture: a site whose pyslurm can be imported."""
    found = Site(folder)
    monkeypatch.syspath_prepend(str(folder / "site"))
    yield found
    found.close()


def kill(pid: int) -> None:
    """Kill a process, and wait until it has ended; its parent has not noticed yet."""
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
