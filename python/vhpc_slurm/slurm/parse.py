# SPDX-License-Identifier: Apache-2.0
"""Reading ``scontrol -o show job -d`` and ``squeue``: text in, values out, no I/O.

The text of ``scontrol show job`` mixes what slurmctld says with what the user
wrote (job name, comment, paths, from 25.05 on his whole command line), unquoted;
a job may well be called ``x UserId=root(0) … CPU_IDs=0-63 Mem=999999``, even with
line breaks.  In all versions the order of the fields is::

    JobId= … JobName=<user's text> … UserId= <slurmctld's fields> … Nodes= CPU_IDs= Mem= GRES= … MinCPUsNode=
    … Command= … WorkDir= Comment= … <user's text>

So what lies between `` UserId=`` and `` MinCPUsNode=`` is slurmctld's own,
provided that each of the two occurs exactly once.  A record where they occur
more often is refused: which one is the true one cannot be told.  Nor can it be
told of several records which ones are true: a name may hold a whole record,
and after it the head of another job's, to which the true fields then seem to
belong.  So scontrol is asked for one record, and what is more is refused.  For
an element of an array or of a heterogeneous job that takes a second question
(``narrower``).  Account and
AllocNode in that stretch are text of the client where slurmdbd does not check
them; so a field must be unique there, and the layouts must be the very end of it.
"""

from __future__ import annotations

import re

from vhpc_slurm.cpulist import parse_cpu_list
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Allocation, GresAllocation, NodeAllocation
from vhpc_slurm.slurm.hostlist import expand
from vhpc_slurm.slurm.job import JobRef, JobStatus, NoSuchJobError, SlurmError, SlurmJob

SQUEUE_FORMAT = "JobID:12,State:20,RestartCnt:10,StartTime:24,Reason:80"
"""Fixed widths: none of the first four holds a space, the last is cut, not needed whole."""

REF_FORMAT = "JobID:12,ArrayJobID:12,ArrayTaskID:24,HetJobID:12,HetJobOffset:12"
"""Numbers of slurmctld's only, and no text of the user's."""

# scontrol prints CPU ids through a buffer of 128 bytes (api/job_info.c) and cuts
# the list silently, even within a number.  22.05 takes one more character away.
CPU_IDS_CUT = 126

_ID = re.compile(r"[0-9]{1,10}", re.ASCII)
_RECORD = re.compile(r"^(?=JobId=\d+ )", re.MULTILINE)
_HEAD = re.compile(
    r"JobId=(?P<id>\d+) (?:ArrayJobId=(?P<array>\d+) |ArrayTaskId=(?P<task>\S+) |ArrayTaskThrottle=\S+ "
    r"|HetJobId=(?P<het>\d+) |HetJobOffset=(?P<offset>\d+) )*JobName="
)
_NAME_TAIL = re.compile(r"(?: (?:SLUID|HetJobIdSet)=\S+)*$")
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
    """Read the output of ``scontrol -o show job -d``, which holds job ``job_id`` and no other.

    Raises:
        NoSuchJobError: the output has no record of that id.
        UserError: text of the user's makes the output ambiguous.
        SlurmError: the record is damaged or of an unknown form.
    """
    records = _records(text, job_id)
    if len(records) > 1:
        raise _ambiguous(job_id)
    if not records or int(records[0][0]["id"]) != job_id:
        raise NoSuchJobError(f"Slurm knows no job {job_id}")
    try:
        return _parse_record(*records[0], job_id)
    except ValueError as err:
        raise SlurmError(f"cannot read what scontrol says of job {job_id}", str(err)) from err


def narrower(text: str, job_id: int) -> str:
    """What to ask scontrol for where its answer has further jobs; empty when it has one record.

    Raises: as ``parse_job``.
    """
    records = _records(text, job_id)
    if len(records) == 1:
        return ""
    # Wherever the true head of this job is, it is there: two heads of its id mean a forged one.
    heads = [head for head, _ in records if int(head["id"]) == job_id]
    if not heads:
        raise NoSuchJobError(f"Slurm knows no job {job_id}")
    (head, *others) = heads
    if others:
        raise _ambiguous(job_id)
    if head["array"] is not None and (head["task"] or "").isdecimal():
        return f"{head['array']}_{head['task']}"
    if head["het"] is not None and head["offset"] is not None:
        return f"{head['het']}+{head['offset']}"
    raise _ambiguous(job_id)


def _records(text: str, job_id: int) -> list[tuple[re.Match[str], str]]:
    """Head and whole of each record."""
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
        f"cannot read what scontrol says of job {job_id}",
        "a name, comment or path of the job looks like fields of scontrol's own",
        "leave 'UserId=', 'MinCPUsNode=' and 'JobId=' out of such texts",
    )


def parse_squeue(text: str) -> tuple[JobStatus, ...]:
    """Read squeue's listing in SQUEUE_FORMAT with times as seconds since the epoch; SlurmError if damaged."""
    found = []
    for line in text.splitlines():
        fields = line.split(None, 4)
        if len(fields) < 4 or not fields[0].isdecimal() or not fields[2].isdecimal():
            raise SlurmError("cannot read what squeue says", f"odd line {line[:120]!r}")
        started = float(fields[3]) if fields[3].isdecimal() else None
        reason = fields[4].strip() if len(fields) > 4 else ""
        found.append(JobStatus(int(fields[0]), int(fields[2]), fields[1], reason, started))
    return tuple(found)


def parse_ref(text: str, job_id: int) -> JobRef:
    """Read squeue's lines in REF_FORMAT for one id.

    The id of an array stands for its elements that have not started, and for
    one of them when it is the last to start; of each of its other elements
    there is a line as well.

    Raises:
        NoSuchJobError: there is no job of that id.
        SlurmError: the lines are damaged, or the id has elements that have not started.
    """
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) != 5 or not _ID.fullmatch(fields[0]):
            raise SlurmError("cannot read what squeue says", f"odd line {line[:120]!r}")
        if int(fields[0]) == job_id:
            found.append(fields[1:])
    if not found:
        raise NoSuchJobError(f"Slurm knows no job {job_id}")
    if len(found) > 1:
        raise SlurmError(f"job {job_id} is {len(found)} elements of an array that have not started")
    array, task, het, offset = found[0]
    if task != "N/A":
        if not (_ID.fullmatch(array) and _ID.fullmatch(task)):
            raise SlurmError(f"job {job_id} is elements {task[:40]} of an array that have not started")
        return JobRef(job_id, array=(int(array), int(task)))
    if _ID.fullmatch(het) and _ID.fullmatch(offset) and int(het):
        return JobRef(job_id, het=(int(het), int(offset)))
    return JobRef(job_id)


def parse_gres(text: str) -> tuple[GresAllocation, ...]:
    """GRES of one node, such as ``gpu:h200:2(IDX:0-1),ibvf(CNT:2)``; else ValueError."""
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
    name, _, rest = record[head.end() :].partition(" UserId=")
    own, _, tail = rest.partition(" MinCPUsNode=")
    identity = _IDENTITY.match(own)
    if identity is None:
        raise ValueError("no UserId and GroupId")
    work_dirs = _WORK_DIR.findall(tail)
    features = re.search(r" Features=(.*?) DelayBoot=", tail, re.DOTALL)
    state = _field(own, "JobState")
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
        batch_host=_batch_host(own),
    )


def _batch_host(own: str) -> str:
    """Where the batch script runs; pending jobs have no such field, interactive ones no script."""
    hosts = re.findall(r" BatchHost=(\S+)", own)
    return str(hosts[0]) if len(hosts) == 1 and _field(own, "BatchFlag") != "0" else ""


def _field(own: str, key: str) -> str:
    values = re.findall(rf" {key}=(\S*)", own)
    if len(values) != 1:
        raise ValueError(f"{len(values)} fields called {key}")
    return str(values[0])


def _allocation(own: str) -> Allocation:
    layouts = _LAYOUTS.search(own)
    if layouts is None:
        return Allocation(())
    nodes: list[NodeAllocation] = []
    for hosts, cpu_ids, memory, gres in _LAYOUT.findall(layouts[0]):
        if len(cpu_ids) >= CPU_IDS_CUT:
            raise ValueError(f"scontrol cut the CPU list of {hosts}: too scattered; ask for whole nodes")
        ids, kinds = parse_cpu_list(cpu_ids), parse_gres(gres)
        nodes.extend(NodeAllocation(host, ids, int(memory), kinds) for host in expand(hosts))
    listed = expand(_field(own, "NodeList"))
    if tuple(sorted(node.node for node in nodes)) != tuple(sorted(listed)):
        raise ValueError(f"its layouts are not those of its nodes {_field(own, 'NodeList')}")
    cpus = _field(own, "NumCPUs")
    if cpus.isdecimal() and sum(len(node.cpu_ids) for node in nodes) < int(cpus):
        raise ValueError(f"its layouts hold fewer than its {cpus} CPUs")
    return Allocation(tuple(nodes))
