# SPDX-License-Identifier: Apache-2.0
"""The Slurm port over pyslurm, where one of Slurm's own release is installed.

pyslurm reads private structs of one Slurm release and does not notice when they
differ: pyslurm 24.11.0 reads an empty allocation from Slurm 24.11.5.  So

- versions are compared with slurmctld's before the first question to a process;
- each allocation must agree with the job's node list and count of CPUs;
- the first job of each kind (with SMT, with GRES, without) is also read by
  scontrol, and both answers must be the same.

pyslurm never runs in this process: see ``pyslurm_client``.  Slurm's own
commands change jobs: pyslurm takes a JobId, which for one element of an array
may mean all of them (``JobRef``).  Elements of arrays that share their record
with others, and components of heterogeneous jobs, are read by scontrol.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from msgspec.structs import asdict

from vhpc_slurm.cpulist import parse_cpu_list
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Allocation, GresAllocation, NodeAllocation
from vhpc_slurm.slurm.hostlist import expand
from vhpc_slurm.slurm.parse import CPU_IDS_CUT
from vhpc_slurm.slurm.port import JobStatus, NoSuchJobError, SlurmError, SlurmJob
from vhpc_slurm.slurm.pyslurm_client import HINT, Client, SlowError, UnusableError, Versions, without_hint
from vhpc_slurm.slurm.scontrol import Scontrol

T = TypeVar("T")
OLDEST = (25, 5)
"""Earlier releases of pyslurm differ from some versions of their own Slurm release."""
RETRY_S = 300.0
"""With ``auto``: how long Slurm's commands are used after pyslurm has failed, in seconds."""
_INVALID_JOB_ID = 2017  # ESLURM_INVALID_JOB_ID in slurm_errno.h
_HAVE_NODES = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING")
log = logging.getLogger("vhpc.slurm")


def installed() -> bool:
    """Whether there is a pyslurm for this Python; it is not imported."""
    return importlib.util.find_spec("pyslurm") is not None


def misfit(versions: Versions, slurm_version: str) -> str:
    """Why this pyslurm must not be used with this Slurm ("25.11.4"); empty when it may."""
    release = _release(slurm_version)
    if release is None:
        return f"Slurm's version is not recognized: {slurm_version!r}"
    for version in filter(None, (versions.pyslurm, versions.built)):
        if _release(version) != release:
            return f"{versions} is of another release than Slurm {slurm_version}"
    if release < OLDEST:
        return f"{versions} is too old: vhpc uses pyslurm from 25.05 on"
    return ""


class PySlurm(Scontrol):
    """Jobs through pyslurm, everything else through Slurm's commands."""

    def __init__(
        self,
        bin_dir: str = "/usr/bin",
        *,
        slurm_conf: str = "",
        timeout_s: float = 5.0,
        start_s: float = 10.0,
        fall_back: bool = False,
    ) -> None:
        """Start nothing yet.

        Args:
            bin_dir: folder of Slurm's commands.
            slurm_conf: path of slurm.conf; empty means Slurm's own default.
            timeout_s: deadline of a question.
            start_s: deadline of importing pyslurm.
            fall_back: ask Slurm's commands where pyslurm cannot be used; else raise UnusableError.
        """
        super().__init__(bin_dir, slurm_conf=slurm_conf, timeout_s=timeout_s)
        self._client = Client(slurm_conf=slurm_conf, timeout_s=timeout_s, start_s=start_s)
        self._fall_back = fall_back
        self._paused_until = 0.0
        self._checked_start = 0
        self._checked = Versions("", "")
        self._slurm_version = ""
        self._proven: frozenset[str] = frozenset()

    def check(self) -> Versions:
        """Compare versions with slurmctld's, and read one running job by pyslurm and by scontrol.

        Raises:
            UnusableError: pyslurm must not be used here; ``why`` has the reason.
            SlurmError: Slurm could not be asked.
        """
        versions = self._usable()
        for job in self._jobs():
            if job.state == "RUNNING":
                try:
                    self._load(job.job_id)
                    break
                except (NoSuchJobError, UserError):
                    continue  # it has ended, or text of its user makes scontrol's answer ambiguous
        return versions

    def pause(self, err: SlurmError) -> None:
        """Use Slurm's commands for RETRY_S, because of this error; only with ``fall_back``."""
        self._paused_until = time.monotonic() + RETRY_S
        why = without_hint(err)
        log.warning("Slurm's commands are used for %g s instead of pyslurm: %s", RETRY_S, why)

    def close(self) -> None:
        """End the process of pyslurm."""
        self._client.close()

    def load(self, job_id: int) -> SlurmJob:
        """One job, by slurm_load_job: two requests of pyslurm, and two each minute for nodes."""
        return self._either(lambda: self._load(job_id), lambda: Scontrol.load(self, job_id))

    def jobs(self) -> tuple[JobStatus, ...]:
        """All jobs that have not ended, by slurm_load_jobs."""
        return self._either(lambda: self.all_seen(self._jobs), lambda: Scontrol.jobs(self))

    def _either(self, by_pyslurm: Callable[[], T], by_commands: Callable[[], T]) -> T:
        if not self._fall_back:
            return by_pyslurm()
        if time.monotonic() < self._paused_until:
            return by_commands()
        try:
            found = by_pyslurm()
        except (UnusableError, SlowError) as err:
            self.pause(err)
            if isinstance(err, SlowError):  # slurmctld may hang: one deadline is enough
                raise
            return by_commands()
        if self._paused_until:
            self._paused_until = 0.0
            log.info("%s is used again", self._checked)
        return found

    def _usable(self) -> Versions:
        """Start pyslurm where it does not run, and check its version once for each process."""
        if not installed():
            raise UnusableError("cannot use pyslurm", "it is not installed for vhpc's Python", HINT)
        versions = self._client.versions()
        if self._client.starts != self._checked_start:
            start = self._client.starts
            running = self.settings().first("SLURM_VERSION")
            if why := misfit(versions, running):
                raise UnusableError("cannot use pyslurm", why, HINT)
            self._checked, self._slurm_version, self._proven = versions, running, frozenset()
            self._checked_start = start
        return versions

    def _load(self, job_id: int) -> SlurmJob:
        self._usable()
        answer = self._ask(job_id, {"ask": "job", "id": job_id})
        try:
            # pyslurm returns the first of several array tasks or components
            if answer["id"] != job_id or answer["het"] or answer["waiting"]:
                return Scontrol.load(self, job_id)
            job = _job(answer)
        except (AttributeError, KeyError, TypeError, ValueError) as err:
            raise self._wrong(job_id, str(err)) from err
        return self._prove(job, {"smt"} if _has_smt(answer) else set())

    def _jobs(self) -> tuple[JobStatus, ...]:
        self._usable()
        answer = self._ask(0, {"ask": "jobs"})
        try:
            return tuple(
                JobStatus(int(number), int(restarts), str(state), str(reason), float(start) or None)
                for number, restarts, state, reason, start in answer["jobs"]
            )
        except (KeyError, TypeError, ValueError) as err:
            raise UnusableError(f"{self._checked} gave no list of jobs", str(err), HINT) from err

    def _prove(self, job: SlurmJob, kinds: set[str]) -> SlurmJob:
        """Return the job if scontrol shows the same job, or did for another job of its kind."""
        if not job.allocation.nodes:
            return job
        kinds = {"plain"} | kinds | ({"gres"} if any(part.gres for part in job.allocation.nodes) else set())
        if kinds <= self._proven:
            return job
        other = Scontrol.load(self, job.job_id)
        # its state may have changed between the two
        if difference := _difference(replace(job, state=other.state, reason=other.reason), other):
            raise self._wrong(job.job_id, f"it says {difference}")
        self._proven |= kinds
        return job

    def _ask(self, job_id: int, question: dict[str, Any]) -> dict[str, Any]:
        answer = self._client.ask(question)
        if "refused" in answer:
            if answer.get("errno") == _INVALID_JOB_ID or "Invalid job id" in str(answer["refused"]):
                raise NoSuchJobError(f"Slurm has no job {job_id}")
            raise SlurmError("slurmctld did not answer pyslurm", str(answer["refused"])[:300])
        if "failed" in answer:
            what = f"job {job_id}" if job_id else "the list of jobs"
            raise UnusableError(f"{self._checked} cannot read {what}", str(answer["failed"])[:300], HINT)
        return answer

    def _wrong(self, job_id: int, why: str) -> UnusableError:
        what = f"{self._checked} misreads job {job_id} of Slurm {self._slurm_version}"
        return UnusableError(what, why[:400], HINT)


def _job(answer: dict[str, Any]) -> SlurmJob:
    """ValueError, KeyError or TypeError where the answer contradicts itself."""
    if not answer["user"] or not answer["partition"] or not answer["state"]:
        raise ValueError("it has no user, partition or state")
    return SlurmJob(
        job_id=int(answer["id"]),
        restarts=int(answer["restarts"]),
        state=str(answer["state"]),
        reason=str(answer["reason"]).replace(" ", "_") or "None",  # as scontrol prints it
        uid=int(answer["uid"]),
        gid=int(answer["gid"]),
        user=str(answer["user"]),
        partition=str(answer["partition"]),
        name=str(answer["name"]),
        work_dir=str(answer["work_dir"]),
        features=str(answer["features"]),
        allocation=_allocation(answer),
        batch_host=str(answer["batch_host"]),
        account=str(answer["account"]),
        qos=str(answer["qos"]),
    )


def _allocation(answer: dict[str, Any]) -> Allocation:
    listed = expand(str(answer["nodes"])) if answer["nodes"] else ()
    parts = answer["layout"]
    if not parts:
        if answer["state"] in _HAVE_NODES:
            raise ValueError(f"it is {answer['state']} on {answer['nodes'] or 'no nodes'} without CPUs")
        return Allocation(())
    if sorted(part[0] for part in parts) != sorted(listed):
        raise ValueError(f"the CPU layouts do not match its node list {answer['nodes']}")
    nodes = tuple(_part(*part) for part in parts)
    cpus = sum(len(node.cpu_ids) for node in nodes)
    if cpus < int(answer["cpus"]):
        raise ValueError(f"the CPU layouts have {cpus} CPUs, fewer than the job's {answer['cpus']}")
    return Allocation(nodes)


def _part(
    name: str, core_ids: str, memory: int, gres: dict[str, Any], size: list[int] | None
) -> NodeAllocation:
    """``size`` are the node's cores and threads per core: pyslurm's ids are those of cores."""
    if len(core_ids) >= CPU_IDS_CUT:
        raise ValueError(f"pyslurm truncated the CPU list of {name}: it has too many ranges")
    if size is None:
        raise ValueError(f"slurmctld does not show node {name}")
    cores, threads = size
    ids = parse_cpu_list(core_ids)
    if not ids or ids[-1] >= cores:
        raise ValueError(f"its cores on {name} are {core_ids or 'none'}, the node has {cores}")
    cpus = tuple(core * threads + thread for core in ids for thread in range(threads))
    return NodeAllocation(name, cpus, int(memory), _gres(gres))


def _gres(kinds: dict[str, Any]) -> tuple[GresAllocation, ...]:
    """From ``{"gpu:h200": {"count": 2, "indexes": "0-1"}, "ibvf:CNT": 2}``; CNT is no type."""
    found = []
    for key, value in kinds.items():
        name, _, kind = str(key).partition(":")
        if isinstance(value, dict):
            indexes = parse_cpu_list(str(value.get("indexes") or ""))
            if len(indexes) != int(value["count"]):
                raise ValueError(f"GRES {key} has {value['count']} units but {len(indexes)} indexes")
            found.append(GresAllocation(name, kind, int(value["count"]), indexes))
        else:
            found.append(GresAllocation(name, "" if kind == "CNT" else kind, int(value)))
    return tuple(found)


def _has_smt(answer: dict[str, Any]) -> bool:
    return any(part[4] and part[4][1] > 1 for part in answer["layout"])


def _difference(job: SlurmJob, other: SlurmJob) -> str:
    """The first field in which two readings of a job differ; empty when in none."""
    for name, value in asdict(job).items():
        if value != getattr(other, name):
            return f"{name}={value!r:.150}, scontrol says {getattr(other, name)!r:.150}"
    return ""


def _release(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None
