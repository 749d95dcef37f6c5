# SPDX-License-Identifier: Apache-2.0
"""Parsing ``scontrol -o show job -d`` and ``squeue``: text in, values out, no I/O.

``scontrol show job`` prints slurmctld's fields and text of the user (job name,
comment, paths, since 25.05 the whole command line) without quotes; a user may
name his job ``x UserId=root(0) … CPU_IDs=0-63 Mem=999999``, even with line
breaks.  In all versions the order of the fields is::

    JobId= … JobName=<user's text> … UserId= <slurmctld's fields> … Nodes= CPU_IDs= Mem= GRES= … MinCPUsNode=
    … Command= … WorkDir= Comment= … <user's text>

So the text between `` UserId=`` and `` MinCPUsNode=`` is from slurmctld if each
of the two occurs exactly once.  A record with more of them is refused, because
a parser cannot tell which one is real.  Several records are refused for the
same reason: a job name may contain a whole record followed by the head of
another job's record, and the real fields would then seem to belong to that
job.  So scontrol is asked for exactly one record; for an array task or a
component of a heterogeneous job this takes a second call (``narrower``).
Account and AllocNode in that text come from the client where slurmdbd does not
check them; so each field must be unique there, and the layouts must be at its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from vhpc_slurm.cpulist import parse_cpu_list
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Allocation, GresAllocation, HetPlace, NodeAllocation
from vhpc_slurm.slurm.hostlist import expand
from vhpc_slurm.slurm.port import JobRef, JobStatus, NoSuchJobError, RunningJob, SlurmError, SlurmJob

T = TypeVar("T")
SQUEUE_FORMAT = "JobID:12,State:20,RestartCnt:10,StartTime:24,Reason:80"
"""Fixed widths: the first four fields contain no space; the last one may be truncated."""

RUNNING_FORMAT = "JobID:12,RestartCnt:10,StartTime:24,EndTime:24,PreemptTime:24"
COMMENT_FORMAT = "JobID:12,admin_comment:1100"
REF_FORMAT = "JobID:12,ArrayJobID:12,ArrayTaskID:24,HetJobID:12,HetJobOffset:12"
"""Only numbers of slurmctld, no text of the user."""

# scontrol prints CPU ids through a buffer of 128 bytes (api/job_info.c) and truncates
# the list silently, even inside a number.  22.05 drops one more character.
CPU_IDS_CUT = 126

_ID = re.compile(r"[0-9]{1,10}", re.ASCII)
_RECORD = re.compile(r"^(?=JobId=\d+ )", re.MULTILINE)
_HEAD = re.compile(
    r"JobId=(?P<id>\d+) (?:ArrayJobId=(?P<array>\d+) |ArrayTaskId=(?P<task>\S+) |ArrayTaskThrottle=\S+ "
    r"|HetJobId=(?P<het>\d+) |HetJobOffset=(?P<offset>\d+) )*JobName="
)
_NAME_TAIL = re.compile(r"(?: (?:SLUID|HetJobIdSet)=\S+)*$")
_COMPONENTS = re.compile(r" HetJobIdSet=([\d,-]+)(?: SLUID=\S+)*$", re.ASCII)
"""JobIds of all components; slurmctld's, since it comes after the user's name of the job."""
_IDENTITY = re.compile(r"(.+?)\((\d+)\) GroupId=(.+?)\((\d+)\) MCS_label=")
_LAYOUT = re.compile(r" +Nodes=(\S+) CPU_IDs=(\S*) Mem=(\d+) GRES=(\S*)")
_LAYOUTS = re.compile(r"(?: +Nodes=\S+ CPU_IDs=\S* Mem=\d+ GRES=\S*)+ *$")
_WORK_DIR = re.compile(r" WorkDir=(.*?)(?= (?:AdminComment|SystemComment|Comment|StdErr)=)", re.DOTALL)
_GRES = re.compile(
    r"(?P<name>[A-Za-z][\w.-]*?)(?::(?P<type>[A-Za-z_][\w.+-]*))?(?::(?P<count>\d+))?"
    r"(?:\((?P<kind>IDX|CNT):(?P<value>[\d,-]+|N/A)\))?(?:,|$)",
    re.ASCII,
)


def parse_job(text: str, job_id: int) -> SlurmJob:
    """Parse the output of ``scontrol -o show job -d`` for job ``job_id`` and no other job.

    Raises:
        NoSuchJobError: the output has no record of that id.
        UserError: text of the user makes the output ambiguous.
        SlurmError: the record is incomplete or has an unknown form.
    """
    return _of_job(text, job_id, lambda head, record: _parse_record(head, record, job_id))


def parse_requeue(text: str, job_id: int) -> bool:
    """Whether job ``job_id`` may be put back into the queue; errors are those of ``parse_job``."""
    return _of_job(text, job_id, lambda head, record: _field(_own(head, record)[1], "Requeue") != "0")


def _of_job(text: str, job_id: int, parse: Callable[[re.Match[str], str], T]) -> T:
    """Parse the only record of a job."""
    records = _records(text, job_id)
    if len(records) > 1:
        raise _ambiguous(job_id)
    if not records or int(records[0][0]["id"]) != job_id:
        raise NoSuchJobError(f"Slurm has no job {job_id}")
    try:
        return parse(*records[0])
    except ValueError as err:
        raise SlurmError(f"cannot parse scontrol's output for job {job_id}", str(err)) from err


def _own(head: re.Match[str], record: str) -> tuple[str, str, str]:
    """The name of a job, slurmctld's fields, and the rest."""
    name, _, rest = record[head.end() :].partition(" UserId=")
    own, _, tail = rest.partition(" MinCPUsNode=")
    return name, own, tail


def narrower(text: str, job_id: int) -> str:
    """Name of the job to ask scontrol for when its output has several records; empty when it has one.

    Raises the errors of ``parse_job``.
    """
    records = _records(text, job_id)
    if len(records) == 1:
        return ""
    # The real head of this job is among them, so two heads with its id mean that one is forged.
    heads = [head for head, _ in records if int(head["id"]) == job_id]
    if not heads:
        raise NoSuchJobError(f"Slurm has no job {job_id}")
    (head, *others) = heads
    if others:
        raise _ambiguous(job_id)
    if head["array"] is not None and (head["task"] or "").isdecimal():
        return f"{head['array']}_{head['task']}"
    if head["het"] is not None and head["offset"] is not None:
        return f"{head['het']}+{head['offset']}"
    raise _ambiguous(job_id)


def _records(text: str, job_id: int) -> list[tuple[re.Match[str], str]]:
    """Parsed head and whole text of each record."""
    found = []
    for record in _RECORD.split(text):
        if not record.strip():
            continue
        head = _HEAD.match(record)
        if head is None or record.count(" UserId=") != 1 or record.count(" MinCPUsNode=") != 1:
            raise _ambiguous(job_id)
        found.append((head, record))
    return found


def _ambiguous(job_id: int) -> UserError:
    return UserError(
        f"cannot parse scontrol's output for job {job_id}",
        "the job's name, comment or a path looks like fields of scontrol",
        "remove 'UserId=', 'MinCPUsNode=' and 'JobId=' from them",
    )


def shows_comment(text: str) -> bool:
    """Whether a record of scontrol may have an AdminComment: text of the user can look like one."""
    return " AdminComment=" in text.rpartition(" MinCPUsNode=")[2]


def parse_comment(text: str, job_id: int) -> str:
    """Parse squeue's line in COMMENT_FORMAT of a job; empty without an AdminComment."""
    rows = (line.split(None, 1) for line in text.splitlines())
    found = next((row[1].strip() for row in rows if len(row) == 2 and row[0] == str(job_id)), "")
    return "" if found in ("(null)", "N/A") else found


def parse_squeue(text: str) -> tuple[JobStatus, ...]:
    """Parse squeue's listing in SQUEUE_FORMAT, times in seconds since the epoch; SlurmError on other text."""
    found = []
    for line in text.splitlines():
        fields = line.split(None, 4)
        if len(fields) < 4 or not fields[0].isdecimal() or not fields[2].isdecimal():
            raise SlurmError("cannot parse squeue's output", f"unexpected line {line[:120]!r}")
        started = float(fields[3]) if fields[3].isdecimal() else None
        reason = fields[4].strip() if len(fields) > 4 else ""
        found.append(JobStatus(int(fields[0]), int(fields[2]), fields[1], reason, started))
    return tuple(found)


def parse_running(text: str) -> tuple[RunningJob, ...]:
    """Parse squeue's listing in RUNNING_FORMAT; SlurmError on other text."""
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) != 5 or not all(field.isdecimal() for field in fields[:3]):
            raise SlurmError("cannot parse squeue's output", f"unexpected line {line[:120]!r}")
        ends, preempted = (float(field) if field.isdecimal() else None for field in fields[3:])
        found.append(RunningJob(int(fields[0]), int(fields[1]), float(fields[2]), ends, preempted))
    return tuple(found)


def parse_ref(text: str, job_id: int) -> JobRef:
    """Parse squeue's lines in REF_FORMAT for one id.

    The id of an array is the id of all its tasks that have not started, and of
    the last task to start; squeue prints a line for each other task too.

    Raises:
        NoSuchJobError: there is no job of that id.
        SlurmError: a line has another form, or tasks of that id have not started.
    """
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) != 5 or not _ID.fullmatch(fields[0]):
            raise SlurmError("cannot parse squeue's output", f"unexpected line {line[:120]!r}")
        if int(fields[0]) == job_id:
            found.append(fields[1:])
    if not found:
        raise NoSuchJobError(f"Slurm has no job {job_id}")
    if len(found) > 1:
        raise SlurmError(f"job {job_id} is an array with {len(found)} tasks that have not started")
    array, task, het, offset = found[0]
    if task != "N/A":
        if not (_ID.fullmatch(array) and _ID.fullmatch(task)):
            raise SlurmError(f"job {job_id} is an array whose tasks {task[:40]} have not started")
        return JobRef(job_id, array=(int(array), int(task)))
    if _ID.fullmatch(het) and _ID.fullmatch(offset) and int(het):
        return JobRef(job_id, het=(int(het), int(offset)))
    return JobRef(job_id)


def parse_gres(text: str) -> tuple[GresAllocation, ...]:
    """Parse the GRES of one node, such as ``gpu:h200:2(IDX:0-1),ibvf(CNT:2)``; else ValueError."""
    if text in ("", "(null)"):
        return ()
    found, place = [], 0
    while place < len(text):
        match = _GRES.match(text, place)
        if match is None or match.end() == place:
            raise ValueError(f"not a GRES list: {text[:120]!r}")
        place = match.end()
        indexes = parse_cpu_list(match["value"]) if match["kind"] == "IDX" and match["value"] != "N/A" else ()
        if match["count"] is not None:
            count = int(match["count"])
        elif match["kind"] == "CNT":
            count = int(match["value"])
        else:
            count = len(indexes) or 1
        if indexes and len(indexes) != count:
            raise ValueError(f"GRES {match['name']} has {count} units but {len(indexes)} indexes")
        found.append(GresAllocation(match["name"], match["type"] or "", count, indexes))
    return tuple(found)


def _parse_record(head: re.Match[str], record: str, job_id: int) -> SlurmJob:
    name, own, tail = _own(head, record)
    identity = _IDENTITY.match(own)
    if identity is None:
        raise ValueError("UserId and GroupId are missing")
    work_dirs = _WORK_DIR.findall(tail)
    features = re.search(r" Features=(.*?) DelayBoot=", tail, re.DOTALL)
    state, het = _field(own, "JobState"), _het_place(head, name)
    return SlurmJob(
        job_id=job_id,
        restarts=int(_field(own, "Restarts")),
        state=state,
        reason=_field(own, "Reason"),
        uid=int(identity[2]),
        gid=int(identity[4]),
        user=identity[1],
        partition=_field(own, "Partition"),
        name=_NAME_TAIL.sub("", name),
        work_dir=work_dirs[-1] if work_dirs else "",
        features="" if features is None or features[1] == "(null)" else features[1],
        allocation=_allocation(own),
        # Slurm shows one for every component of a heterogeneous job, but runs the first one's script only
        batch_host=_batch_host(own) if het is None or het.offset == 0 else "",
        het=het,
        account=_named(own, "Account"),
        qos=_named(own, "QOS"),
    )


def _het_place(head: re.Match[str], name: str) -> HetPlace | None:
    """The place of a component in its heterogeneous job; ``name`` is the text between JobName and UserId."""
    if head["het"] is None or head["offset"] is None:
        return None
    ids = _COMPONENTS.search(name)
    if ids is None:
        raise ValueError("HetJobIdSet is missing")
    runs = (run.partition("-") for run in ids[1].split(","))
    components = sum(int(last or first) - int(first) + 1 for first, _, last in runs)
    return HetPlace(int(head["het"]), int(head["offset"]), components)


def _batch_host(own: str) -> str:
    """Node of the batch script; pending jobs have no such field, interactive jobs no script."""
    hosts = re.findall(r" BatchHost=(\S+)", own)
    return str(hosts[0]) if len(hosts) == 1 and _field(own, "BatchFlag") != "0" else ""


def _field(own: str, key: str) -> str:
    values = re.findall(rf" {key}=(\S*)", own)
    if len(values) != 1:
        raise ValueError(f"{len(values)} fields are named {key}")
    return str(values[0])


def _named(own: str, key: str) -> str:
    """A field whose value is empty where Slurm prints ``(null)``."""
    value = _field(own, key)
    return "" if value == "(null)" else value


def _allocation(own: str) -> Allocation:
    layouts = _LAYOUTS.search(own)
    if layouts is None:
        return Allocation(())
    nodes: list[NodeAllocation] = []
    for hosts, cpu_ids, memory, gres in _LAYOUT.findall(layouts[0]):
        if len(cpu_ids) >= CPU_IDS_CUT:
            raise ValueError(
                f"scontrol truncated the CPU list of {hosts}: it has too many ranges; request whole nodes"
            )
        ids, kinds = parse_cpu_list(cpu_ids), parse_gres(gres)
        nodes.extend(NodeAllocation(host, ids, int(memory), kinds) for host in expand(hosts))
    listed = expand(_field(own, "NodeList"))
    if tuple(sorted(node.node for node in nodes)) != tuple(sorted(listed)):
        raise ValueError(f"the CPU layouts do not match its NodeList {_field(own, 'NodeList')}")
    cpus = _field(own, "NumCPUs")
    if cpus.isdecimal() and sum(len(node.cpu_ids) for node in nodes) < int(cpus):
        raise ValueError(f"the CPU layouts have fewer CPUs than its NumCPUs={cpus}")
    return Allocation(tuple(nodes))
