# SPDX-License-Identifier: Apache-2.0
"""Is the end of every job, and the reason of every drained node, explained by one line?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from campaign.faults import (
    CANCELLED,
    CLUSTER,
    COMMENT,
    FINAL,
    FORGOTTEN,
    HELD,
    ID_REUSED,
    JOB,
    KILLED,
    LINE,
    LOST_START,
    NO_STEPD,
    NODE,
    NODE_FAIL,
    PEER_KILLED,
    SLURM,
    UNHEARD,
    UNSAVED,
    Fault,
)
from campaign.kinds import KINDS, Kind
from campaign.record import Injected, Submitted
from campaign.watch import ENDED, Track, Trouble

GRACE_S = 8.0
"""A fault still touches what is there so long after it was undone: daemons register, clients try again."""
DRAIN_S = 90.0
"""A Prolog that a fault broke may run into its own timeouts before it drains the node."""
MIN_JOB_AGE_S = 300.0
"""MinJobAge of slurm.conf(5), its default: slurmctld forgets a job that has ended for so long."""
KILL_FAILED = "Kill task failed"
"""Slurm's reason to drain a node with a step that did not end within UnkillableStepTimeout."""
OVER = ENDED | {"COMPLETING"}
OURS = re.compile(r"^vhpc: .+", re.MULTILINE)
# AdminComment of a job without a problem: only its image and usage.
IMAGE = re.compile(r"vhpc:(?: image \S+@sha256:[0-9a-f]{64};?)?(?: usage (?:[a-z_]+=[0-9./]+ ?)+)?")
HOLDER = re.compile(r"^vhpc: .* held by (?:a guest|guests) of (\d+)\.", re.MULTILINE)
PEER = r"(?:node \S+: )?"
"""In the message of a job with a network, if its guests of another node are the reason."""
QEMU_BUG = re.compile(rf"^vhpc: {PEER}QEMU crashed on \S+ while .*: .*Assertion .* failed.*", re.MULTILINE)
"""QEMU's own complaint: it was not killed."""
NO_BOOT = re.compile(rf"^vhpc: {PEER}(image \S+ did not (get ready|boot)|the guest ended on) ")
"""A guest that did not come up, as its console says: daemons of the cluster have no part in that."""
NO_START = re.compile(r"^vhpc: cannot start the guest: ")
STALLED = re.compile(
    rf"^vhpc: {PEER}image \S+ did not get ready .*console ended with: .*"
    r"(rcu\w*: .*(stall|starved)|soft lockup|blocked for more than|clocksource: .* unstable)",
    re.MULTILINE,
)
"""The guest's kernel complains that it gets no CPU time: the load of the machine, and no fault of ours."""
UNENDED = re.compile(r"^srun: error: Timed out waiting for job step to complete$", re.MULTILINE)
BATCH_DONE = re.compile(r"\.batch\] done with (?:job|step)$")
"""slurmstepd writes it when slurmctld has taken the end of the script from it."""
TASK_KILLED = re.compile(r"^srun: error: n\d+: tasks? [0-9,-]+: Killed$", re.MULTILINE)
SLURMS = re.compile(
    r"^(slurmstepd|srun|salloc)(-\w+)?: (error: .+|Force Terminated .+|Job allocation .* revoked.*)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class End:
    """The end of a job (an element of an array)."""

    name: str
    kind: Kind
    track: Track | None
    output: str
    comment: str
    accounted: tuple[str, str]
    """State and exit code in accounting; empty where there is no row."""
    wrong: str = ""
    """Why this is not how a job of its kind ends; empty when it is."""
    batch: str = ""
    """The last line of its batch script's slurmstepd in the log of a slurmd; empty when there is none."""
    short: bool = False
    """Whether its time limit may end it before a health check finds that it was never started."""

    @property
    def state(self) -> str:
        """Its last state; FORGOTTEN when slurmctld did not know it at the end of the campaign."""
        return self.track.now.state if self.track is not None and self.track.ended else "FORGOTTEN"


@dataclass(frozen=True)
class Verdict:
    """One job's end, and the line that explains it (empty: nothing does)."""

    end: End
    touched: tuple[Injected, ...]
    why: str
    own: bool
    """It ended as its kind says."""


def differs(end: End) -> str:
    """How an end is not what its kind says; empty when it is."""
    kind = end.kind
    if kind.act == "refused":
        return "" if _missing(end) == "" and end.track is None else "it was not refused"
    if end.state != kind.state:
        return f"{end.state} instead of {kind.state}"
    assert end.track is not None
    if kind.code is not None and end.track.now.code != kind.code:
        return f"exit code {end.track.now.code} instead of {kind.code}"
    return _missing(end)


def _missing(end: End) -> str:
    nodes = end.track.now.nodes if end.track is not None else ()
    for said in end.kind.says:
        pattern = re.sub(r"<node (\d)>", lambda found: (*nodes, "", "")[int(found[1])], said)
        if not re.search(pattern, end.output, re.MULTILINE):
            return f"its output lacks {pattern}"
    return ""


def escaped(end: End) -> bool:
    """Whether a script that belongs into a guest ran on the host: never, under no fault."""
    return end.kind.in_guest and "up on the host" in end.output


def touches(
    end: End,
    job: Submitted,
    faults: Sequence[Injected],
    reused: frozenset[int],
    holder: tuple[str, int] | None = None,
) -> tuple[Injected, ...]:
    """Faults that can have changed the end of a job; ``holder`` is the job that it says was in its way."""
    found = []
    for fault in faults:
        reach = fault.fault.reach
        if reach == JOB:
            hit = fault.target in {(job.plan.name, _index(end)), holder} - {None}
        elif end.track is None:
            hit = reach == CLUSTER and fault.begin < job.at + 60 and fault.end > job.at
        else:
            node = fault.node if reach == NODE else None
            spans = [(since, until) for since, until in end.track.spans(node)]
            if reach == CLUSTER and spans:
                spans = [(job.at, spans[-1][1])]
            hit = any(since - 2 <= fault.end + GRACE_S and until + 2 >= fault.begin for since, until in spans)
            before = not spans or fault.begin < spans[0][0]  # without spans it never ran
            if ID_REUSED in fault.fault.ends and end.track.ids & reused and before:
                hit = True
        if hit:
            found.append(fault)
    return tuple(found)


def _index(end: End) -> int:
    return int(end.name.rpartition(".")[2])


def judge(end: End, touched: tuple[Injected, ...], reused: frozenset[int]) -> Verdict:
    """Find the line that explains an end."""
    if escaped(end):
        return Verdict(end, touched, "", own=False)
    if not end.wrong:
        restarts = end.track.now.restarts if end.track is not None else 0
        again = f", in its {restarts + 1}. run" if restarts else ""
        return Verdict(end, touched, f"as its kind says{again}", own=True)
    stalled = STALLED.search(end.output) if end.state == "FAILED" else None
    if stalled:
        return Verdict(end, touched, f"by itself, under the machine's load: {stalled[0]}", own=False)
    for fault in sorted(touched, key=lambda fault: fault.fault.reach != JOB):
        for way in fault.fault.ends:
            line = evidence(way, end, reused, fault.fault)
            if line:
                return Verdict(end, touched, f"{fault.fault.name}: {line}", own=False)
    bug = QEMU_BUG.search(end.output) if end.state == "FAILED" else None
    return Verdict(end, touched, f"by itself: {bug[0]}" if bug else "", own=False)


def _our_line(end: End, fault: Fault) -> str:
    """The first line of ours that such a fault can have caused; empty when there is none."""
    lines = (found[0] for found in OURS.finditer(end.output))
    return next((line for line in lines if fault.stops_boots or not NO_BOOT.search(line)), "")


def evidence(way: str, end: End, reused: frozenset[int], fault: Fault) -> str:
    """The evidence that a job ended in that way by such a fault; empty if there is none."""
    ids = end.track.ids if end.track is not None else frozenset()
    code = end.track.now.code if end.track is not None else ""
    failed = end.state in ("FAILED", "NODE_FAIL", "CANCELLED")
    # srun may say why there is no output, and end with 0
    failed_or_incomplete = failed or (end.state == "COMPLETED" and _missing(end) != "")
    unstarted = end.state == "TIMEOUT" and not end.output
    timed_out = unstarted and (end.kind.name == "time-limit" or (end.short and not end.batch))
    given_up = end.state in ("TIMEOUT", "CANCELLED", "NODE_FAIL")
    reported = given_up and not _missing(end) and BATCH_DONE.search(end.batch)
    seen = end.track.seen if end.track is not None else []
    # slurmctld has an older state of the job than was seen
    undone = any(
        a.restarts == b.restarts
        and (
            (a.state in OVER and b.state not in OVER)
            or (a.state, b.state) == ("RUNNING", "PENDING")
            or (a.state, a.reason, b.state, b.reason) == ("RUNNING", "None", "RUNNING", "Prolog")
            or (a.state == b.state == "RUNNING" and a.nodes != b.nodes)
        )
        for a, b in pairwise(seen)
    )
    unsaved = ""
    if undone:
        unsaved = "slurmctld was killed before it saved what had become of the job"
    elif end.kind.act == "interactive" and end.state == "CANCELLED" and not _missing(end):
        unsaved = "slurmctld was killed before it saved the end of an srun, whose output is complete"
    elif reported:
        unsaved = f"slurmctld was killed after it had been told of the script's end: {end.batch}"
    final = failed and "--no-requeue" in end.kind.options and not end.output
    waited = end.kind.act == "interactive" and end.state == "TIMEOUT" and not _missing(end)
    held = HOLDER.search(end.output)
    killed = TASK_KILLED.search(end.output)
    ours = _our_line(end, fault) if failed_or_incomplete else ""
    slurms = SLURMS.search(end.output) if failed_or_incomplete else None
    shown = {
        LINE: ours,
        ID_REUSED: ours if ids & reused else "",
        COMMENT: end.comment if end.comment.startswith("vhpc: ") and not IMAGE.fullmatch(end.comment) else "",
        SLURM: slurms[0] if slurms else "",
        FINAL: "its start was lost, and it may not be requeued" if final else "",
        LOST_START: "its start was lost, and its time limit was over" if timed_out else "",
        KILLED: "killed by signal 9" if code in ("0:9", "9:0", "137:0") else "",
        CANCELLED: "cancelled" if end.state == "CANCELLED" else "",
        UNSAVED: unsaved,
        UNHEARD: "Slurm: TIMEOUT; its task had ended, and srun was not told" if waited else "",
        NO_STEPD: _without_stepd(end),
        PEER_KILLED: killed[0] if end.state == "TIMEOUT" and killed else "",
        HELD: held[0] if failed and held else "",
        NODE_FAIL: "Slurm: NODE_FAIL" if end.state == "NODE_FAIL" else "",
        FORGOTTEN: "slurmctld was killed before it saved the job" if end.state == "FORGOTTEN" else "",
    }
    return shown[way]


def _without_stepd(end: End) -> str:
    """The evidence that slurmctld waited for a slurmstepd that was gone; empty if there is none."""
    if end.state != "TIMEOUT":
        return ""
    if end.kind.act == "interactive":
        unended = UNENDED.search(end.output)
        return unended[0] if unended else ""
    if not end.batch or BATCH_DONE.search(end.batch):
        return ""
    return f"slurmctld was not told of the script's end: {end.batch}"


def drained_by(trouble: Trouble, faults: Sequence[Injected]) -> Injected | None:
    """The fault that explains why a node was drained; of several the last."""
    of_guest = bool(NO_START.search(trouble.reason))
    for fault in reversed(faults):
        if of_guest and not fault.fault.stops_boots:
            continue
        until = fault.end + DRAIN_S + (MIN_JOB_AGE_S if _repeats(fault) else 0)
        near = fault.begin - 2 <= trouble.at <= until
        here = fault.node in ("", trouble.node)
        if near and here and fault.fault.drains and re.match(fault.fault.drains, trouble.reason):
            return fault
    return None


def _repeats(fault: Injected) -> bool:
    """Whether slurmd reports it again and again: a failed Prolog of a job that it may not requeue.

    The node is drained every 15 s (RETRY_DELAY in Slurm's req.c) until slurmctld has forgotten the job.
    """
    if fault.fault.role != "prolog" or fault.target is None:
        return False
    return "--no-requeue" in KINDS[fault.target[0].partition("-")[2]].options


def without_processes(log: str) -> list[int]:
    """Jobs whose extern step was given up, by slurmd's log, although its program, sleep, had ended.

    slurmstepd before Slurm 25.05.1 may wait until UnkillableStepTimeout for a thread of its own: a race when
    KillWait is over, with guests and without. If there was a process, it gets SIGKILL first.
    """
    given_up = re.findall(
        r"EXTERN STEP FOR (\d+) STEPD TERMINATED .* DUE TO JOB NOT ENDING WITH SIGNALS", log
    )
    jobs = sorted({int(job) for job in given_up})
    return [job for job in jobs if not re.search(rf"\[{job}\.extern\] .*: Sending signal 9 to pid", log)]
