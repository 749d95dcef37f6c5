# SPDX-License-Identifier: Apache-2.0
"""After the queue is empty: what is left, and what became of everything."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from cluster import Lab

from campaign.attack import starts
from campaign.judge import (
    HOLDER,
    KILL_FAILED,
    End,
    Verdict,
    differs,
    drained_by,
    judge,
    touches,
    without_processes,
)
from campaign.kinds import FOLDER
from campaign.plan import USERS, Plan
from campaign.record import Record, Submitted
from campaign.run import Campaign
from campaign.trends import Trend, trends
from campaign.watch import Trouble

CLEAN_S = 330.0
"""vhpcd looks every minute, the health check every two, and either may have to wait for the other."""
_READ = """
import json, pathlib, sys
top = pathlib.Path(sys.argv[1])
print(json.dumps({path.name: path.read_text(errors="replace") for path in top.iterdir() if path.is_file()}))
"""


@dataclass(frozen=True)
class Findings:
    """The result of a campaign."""

    verdicts: list[Verdict]
    drains: list[tuple[Trouble, str]]
    """Drained nodes, each with the kind of the fault, or what of Slurm, that explains it; empty: nothing."""
    left: list[str]
    """Objects that were not removed in CLEAN_S."""
    clean_after_s: float
    states: dict[str, str]
    duration_s: float
    harm: list[str]
    """Places that the attacker reached, and starts of others that she delayed."""
    grown: list[Trend] = field(default_factory=list)
    """Resources of daemons and files that grow."""
    broken: list[str] = field(default_factory=list)
    """Failed parts of the campaign itself."""

    @property
    def unexplained(self) -> list[Verdict]:
        """Ends that no line explains."""
        return [verdict for verdict in self.verdicts if not verdict.why]

    @property
    def causeless(self) -> list[Trouble]:
        """Drained nodes that nothing explains."""
        return [trouble for trouble, cause in self.drains if not cause]

    @property
    def passed(self) -> bool:
        """Whether there is nothing to be mended."""
        idle = all(state.removesuffix("+PLANNED") == "IDLE" for state in self.states.values())
        return idle and not (
            self.unexplained or self.causeless or self.left or self.harm or self.grown or self.broken
        )


def carry_out(lab: Lab, plan: Plan, stop: threading.Event | None = None) -> tuple[Record, Findings]:
    """A campaign from its beginning to its end, told on stderr; drained nodes are taken back.

    When ``stop`` is set, it ends with the jobs that it has submitted.
    """
    began = time.monotonic()
    plan = plan if plan.light or lab.has_nat() else plan.without_nat()
    campaign = Campaign(
        lab,
        plan if plan.light or lab.has_pmix() else plan.without_pmix(),
        lambda line: print(line, file=sys.stderr, flush=True),
        stop or threading.Event(),
    )
    campaign.run()
    found = find(campaign, time.monotonic() - began)
    for node in lab.nodes:
        if "DRAIN" in lab.node_state(node)[0]:
            lab.resume(node)
    return campaign.record, found


def find(campaign: Campaign, duration_s: float) -> Findings:
    """Look at everything; the queue is empty."""
    lab, record, tracks = campaign.lab, campaign.record, campaign.watch.tracks
    began = time.monotonic()
    while (left := remains(lab)) and time.monotonic() < began + CLEAN_S:
        time.sleep(3)
    clean_after_s = time.monotonic() - began
    outputs, rows, batches = read_outputs(lab), accounting(lab), batch_lines(lab)
    known = {id_ for track in tracks.values() for id_ in track.ids}
    lost = [job for job in record.submitted if job.id and not all(_ended(campaign, key) for key in job.keys)]
    reused = frozenset(job.id for job in lost) & known
    verdicts = []
    for job in record.submitted:
        for key in job.keys:
            try:
                end = _end(job, key, campaign, outputs, rows, batches)
                held = HOLDER.search(end.output)
                holder = campaign.watch.of_job(int(held[1])) if held else None
                touched = touches(end, job, record.injected, reused, holder)
                verdicts.append(judge(end, touched, reused))
            except Exception:  # one job must not cost the report of all
                record.broken.append(f"{key[0]}.{key[1]} was not judged:\n{traceback.format_exc()}")
    stuck = stuck_extern_steps(lab)
    drains = [(trouble, _cause(trouble, record, stuck)) for trouble in campaign.watch.troubles]
    states = {node: lab.node_state(node)[0] for node in lab.nodes}
    harm, grown = harm_done(campaign, verdicts), [row for row in trends(record.samples) if row.bad]
    return Findings(verdicts, drains, left, clean_after_s, states, duration_s, harm, grown, record.broken)


def _cause(trouble: Trouble, record: Record, stuck: dict[str, str]) -> str:
    fault = drained_by(trouble, record.injected)
    if fault is not None:
        return fault.plan.kind
    return stuck.get(trouble.node, "") if trouble.reason == KILL_FAILED else ""


def harm_done(campaign: Campaign, verdicts: list[Verdict]) -> list[str]:
    """An attacker's effects on others; measured with jobs that no fault touched."""
    attacks = campaign.record.attacks
    if attacks is None:
        return []
    jobs: dict[int, float] = {}
    for verdict in verdicts:
        track = verdict.end.track
        if verdict.own and not verdict.touched and track is not None and len(track.ids) == 1:
            begun = [seen.at for seen in track.seen if seen.state != "PENDING"]
            jobs |= {track.now.job: begun[0]} if begun and not track.now.restarts else {}
    attacks.starts = starts(campaign.lab, attacks.done, jobs)
    delayed = [f"vhpcd cost the start of job {start.job} {start.cost_s:.1f} s" for start in attacks.delayed]
    return [f"the attacker: {breach}" for breach in attacks.breaches] + delayed


def _ended(campaign: Campaign, key: tuple[str, int]) -> bool:
    track = campaign.watch.tracks.get(key)
    return track is not None and track.ended


def _end(
    job: Submitted,
    key: tuple[str, int],
    campaign: Campaign,
    outputs: dict[str, str],
    rows: dict[str, tuple[str, str, str]],
    batches: dict[int, str],
) -> End:
    name = f"{key[0]}.{key[1]}"
    output = outputs.get(name, "")
    if job.answer is not None and job.kind.act in ("interactive", "refused"):
        output = job.answer.out + job.answer.err
    track = campaign.watch.tracks.get(key)
    element = f"{job.id}_{key[1]}" if job.kind.tasks > 1 else str(track.now.job if track else job.id)
    state, code, comment = rows.get(f"{key[0]}|{element}", ("", "", ""))
    # an element of an array that waits has the id of another
    ran = {seen.job for seen in track.seen if seen.nodes} if track else set()
    batch = next((batches[id_] for id_ in sorted(ran) if id_ in batches), "")
    accounted = (state, code)
    end = End(name, job.kind, track, output, comment, accounted, batch=batch, short=campaign.plan.light)
    return replace(end, wrong=differs(end))


def remains(lab: Lab) -> list[str]:
    """Leftovers: by an independent count, by vhpc's own report, and in vhpcd's database."""
    found = lab.leaks()
    found += [f"lease {lease}" for lease in lab.leases()]
    for node in lab.nodes:
        found += [f"{node}: vhpc reconcile: {outcome}" for outcome in lab.vhpc(node, "reconcile", "--check")]
    return found


def read_outputs(lab: Lab) -> dict[str, str]:
    """Text of all files that jobs wrote, by name (which both users never have in common)."""
    texts: dict[str, str] = {}
    for user in USERS:
        done = lab.run("login", "python3", "-", f"/home/{user}/{FOLDER}", user=user, stdin=_READ)
        texts |= json.loads(done.out)
    return texts


def step_logs(lab: Lab, step: str) -> Iterator[tuple[str, str]]:
    """Each node, with the lines in its slurmd's log that slurmstepds of such steps have written."""
    for node in lab.nodes:
        done = lab.run(node, "grep", "-h", f"{step}\\]", "/var/log/slurm/slurmd.log", check=False)
        yield node, done.out


def batch_lines(lab: Lab) -> dict[int, str]:
    """By job the last line of its batch script's slurmstepd, with its node."""
    found = {}
    for node, log in step_logs(lab, "batch"):
        for line in log.splitlines():
            if match := re.search(r"\[(\d+)\.batch\] ", line):
                found[int(match[1])] = f"{node}: {line}"
    return found


def stuck_extern_steps(lab: Lab) -> dict[str, str]:
    """Lines by node about extern steps that did not end although they had no process left."""
    found = {}
    for node, log in step_logs(lab, "extern"):
        if jobs := without_processes(log):
            found[node] = f"Slurm: the extern step of job {jobs[-1]} had no process and did not end"
    return found


def accounting(lab: Lab) -> dict[str, tuple[str, str, str]]:
    """(state, exit code, AdminComment) in accounting by "name|id"; of requeued jobs the last row."""
    out = lab.run(
        "ctl", "sacct", "-anXP", "-S", "now-6hours", "-o", "JobName,JobID,State,ExitCode,AdminComment"
    ).out
    rows = {}
    for line in out.splitlines():
        cells = line.split("|", 4)
        if len(cells) == 5:
            rows[f"{cells[0]}|{cells[1]}"] = (cells[2].split(" ")[0], cells[3], cells[4])
    return rows
