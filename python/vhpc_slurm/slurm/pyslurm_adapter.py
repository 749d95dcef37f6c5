# SPDX-License-Identifier: Apache-2.0
"""The Slurm port over pyslurm, where one of Slurm's own X.Y version is installed.

pyslurm binds libslurm of exactly one Slurm release.  Three traps, read in its
sources (24.5 to 25.11, core/job/job.pyx):

- ``get_resource_layout_per_node`` takes one thread per core for granted, so on
  nodes with SMT its ids are core ids.  There this adapter refuses.
- it prints ids through a buffer of 128 bytes and cuts silently, as scontrol does.
- libslurm ends the process on configuration errors and does not survive fork.

What changes a job is left to Slurm's own commands: pyslurm takes a JobId, which
for one element of an array may mean all of them (``JobRef``).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from vhpc_slurm.cpulist import parse_cpu_list
from vhpc_slurm.model import Allocation, GresAllocation, NodeAllocation
from vhpc_slurm.slurm.parse import CPU_IDS_CUT
from vhpc_slurm.slurm.port import JobStatus, NoSuchJobError, SlurmError, SlurmJob
from vhpc_slurm.slurm.scontrol import Scontrol

_HINT = "set slurm_adapter = 'scontrol' in vhpc.toml"


def unavailable(slurm_version: str) -> str:
    """Why pyslurm cannot be used with this Slurm ("24.11.5"); empty when it can."""
    if importlib.util.find_spec("pyslurm") is None:
        wanted = f"pip install 'pyslurm=={_major(slurm_version)}.*'"
        return f"pyslurm is not installed; {wanted} where that version exists"
    version = str(getattr(importlib.import_module("pyslurm"), "__version__", "?"))
    if _major(version) != _major(slurm_version):
        return f"pyslurm {version} binds Slurm {_major(version)}, here is Slurm {slurm_version}"
    return ""


class PySlurm(Scontrol):
    """Jobs through pyslurm, everything else through Slurm's commands."""

    def __init__(self, bin_dir: str = "/usr/bin", *, slurm_conf: str = "", timeout_s: float = 5.0) -> None:
        """Raise SlurmError when pyslurm cannot be imported (not installed, or built for another Slurm)."""
        super().__init__(bin_dir, slurm_conf=slurm_conf, timeout_s=timeout_s)
        try:
            self._api: Any = importlib.import_module("pyslurm")
        except (ImportError, OSError) as err:
            raise SlurmError("cannot use pyslurm", str(err), _HINT) from err

    def load(self, job_id: int) -> SlurmJob:
        """One job, by slurm_load_job."""
        job = self._call(job_id, lambda: self._api.Job.load(job_id))
        # pyslurm returns the first of several array tasks or components
        if int(job.id) != job_id or getattr(job, "heterogeneous_id", None):
            return super().load(job_id)
        return SlurmJob(
            job_id=int(job.id),
            restarts=int(job.requeue_count),
            state=str(job.state),
            reason=str(job.state_reason),
            uid=int(job.user_id),
            gid=int(job.group_id),
            user=str(job.user_name),
            partition=str(job.partition),
            name=str(job.name or ""),
            work_dir=str(job.working_directory or ""),
            features=",".join(job.constraints or ()),
            allocation=self._allocation(job),
            account=str(job.account or ""),
            qos=str(job.qos or ""),
        )

    def jobs(self) -> tuple[JobStatus, ...]:
        """All jobs that have not ended, by slurm_load_jobs."""
        return self.all_seen(self._jobs)

    def _jobs(self) -> tuple[JobStatus, ...]:
        found = []
        for job in self._call(0, self._api.Jobs.load).values():
            state = str(job.state)
            if state in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED"):
                started = float(job.start_time) if job.start_time else None
                found.append(
                    JobStatus(int(job.id), int(job.requeue_count), state, str(job.state_reason), started)
                )
        return tuple(found)

    def _allocation(self, job: Any) -> Allocation:
        layout = self._call(int(job.id), job.get_resource_layout_per_node)
        nodes = []
        for name, part in layout.items():
            node = self._call(int(job.id), lambda name=name: self._api.Node.load(name))
            cpu_ids = str(part["cpu_ids"])
            if int(node.threads_per_core or 1) > 1:
                raise SlurmError(
                    f"cannot read the cores of job {job.id}", f"pyslurm ignores SMT, {name} has it", _HINT
                )
            if len(cpu_ids) >= CPU_IDS_CUT:
                raise SlurmError(
                    f"cannot read the cores of job {job.id}", "pyslurm cut a scattered list", _HINT
                )
            nodes.append(
                NodeAllocation(name, parse_cpu_list(cpu_ids), int(part["memory"] or 0), _gres(part["gres"]))
            )
        return Allocation(tuple(nodes))

    def _call(self, job_id: int, call: Any) -> Any:
        try:
            return call()
        except self._api.RPCError as err:
            if "Invalid job id" in str(err):
                raise NoSuchJobError(f"Slurm has no job {job_id}") from err
            raise SlurmError("slurmctld refused a request", str(err)) from err


def _gres(kinds: dict[str, Any]) -> tuple[GresAllocation, ...]:
    """From ``{"gpu:h200": {"count": 2, "indexes": "0-1"}, "ibvf:CNT": 2}``; CNT is no type."""
    found = []
    for key, value in kinds.items():
        name, _, kind = str(key).partition(":")
        if isinstance(value, dict):
            indexes = parse_cpu_list(str(value.get("indexes") or ""))
            found.append(GresAllocation(name, kind, int(value["count"]), indexes))
        else:
            found.append(GresAllocation(name, "" if kind == "CNT" else kind, int(value)))
    return tuple(found)


def _major(version: str) -> str:
    year, _, rest = version.partition(".")
    return f"{int(year) if year.isdecimal() else year}.{int(rest.partition('.')[0] or 0):02d}"
