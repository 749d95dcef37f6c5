# SPDX-License-Identifier: Apache-2.0
"""A campaign's findings as Markdown for people and as JSON for programs."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from campaign import trends
from campaign.attack import Attacks
from campaign.findings import Findings
from campaign.judge import Verdict
from campaign.plan import Plan
from campaign.record import Record


def markdown(plan: Plan, record: Record, findings: Findings) -> str:
    """The report."""
    verdicts = findings.verdicts
    own = sum(verdict.own for verdict in verdicts)
    parts = [
        f"# Fault campaign, seed {plan.seed}",
        f"{len(record.submitted)} jobs ({len(verdicts)} with array elements), {len(record.injected)} faults"
        f" ({len(record.missed)} more found nothing to hit) in {findings.duration_s / 60:.1f} min;"
        f" all clear {findings.clean_after_s:.0f} s after the last job.",
        *(
            [f"**Stopped before its end**: {len(plan.jobs)} jobs were planned."]
            if _stopped(plan, record)
            else []
        ),
        "Passed." if findings.passed else "**Not passed.**",
        _table(
            ("what", "count"),
            [
                ("jobs that ended as their kind says", own),
                ("jobs whose other end one line explains", len(verdicts) - own - len(findings.unexplained)),
                ("unexplained ends", len(findings.unexplained)),
                ("leaks", len(findings.left)),
                ("drained nodes", len(findings.drains)),
                ("drained nodes that nothing explains", len(findings.causeless)),
                ("what the operator did", len(record.helped)),
                *([("daemons and files that grow", len(findings.grown))] if record.samples else []),
            ],
        ),
        "## Jobs",
        _jobs(verdicts),
        "## Faults",
        _faults(record, verdicts),
        "## Ends that a fault explains",
        _list(f"{v.end.name}: {v.end.wrong}. {v.why}" for v in verdicts if v.why and not v.own),
        "## Drained nodes",
        _list(
            f"{trouble.node} {trouble.state}: {trouble.reason} ({cause or '**no fault**'})"
            for trouble, cause in findings.drains
        ),
        "## Unexplained",
        _list(_unexplained(verdict) for verdict in findings.unexplained),
        "## Left behind",
        _list(findings.left),
        *(["## What failed of the campaign itself", _list(findings.broken)] if findings.broken else []),
        *(["## Over the whole run", trends.RULE, _over_time(record)] if record.samples else []),
        *(["## Attacks", _attacks(record.attacks), _list(findings.harm)] if record.attacks else []),
    ]
    return "\n\n".join(parts) + "\n"


def plain(plan: Plan, record: Record, findings: Findings) -> dict[str, Any]:
    """The same for programs."""
    return {
        "seed": plan.seed,
        "passed": findings.passed,
        "duration_s": round(findings.duration_s, 1),
        "clean_after_s": round(findings.clean_after_s, 1),
        "jobs": [
            {
                "name": verdict.end.name,
                "state": verdict.end.state,
                "as_its_kind": verdict.own,
                "why": verdict.why,
                "wrong": verdict.end.wrong,
                "touched": [fault.plan.number for fault in verdict.touched],
                "accounted": verdict.end.accounted,
                "output": verdict.end.output if not verdict.own else "",
            }
            for verdict in findings.verdicts
        ],
        "faults": [
            {"number": f.plan.number, "kind": f.plan.kind, "node": f.node, "hit": f.target, "note": f.note}
            for f in record.injected
        ],
        "missed": [fault.kind for fault in record.missed],
        "drains": [(trouble.node, trouble.reason, cause) for trouble, cause in findings.drains],
        "left": findings.left,
        "operator": record.helped,
        "attacks": asdict(record.attacks) if record.attacks else None,
        "harm": findings.harm,
        "broken": findings.broken,
        "stopped": _stopped(plan, record),
        "trends": [asdict(trend) for trend in trends.trends(record.samples)],
        "samples": [
            {
                "at_s": round(sample.at_s, 1),
                "jobs": sample.jobs,
                "held": {f"{name}, {unit}": value for (name, unit), value in sample.held.items()},
                "cpu_s": sample.cpu_s,
                "pids": sample.pids,
            }
            for sample in record.samples
        ],
    }


def _stopped(plan: Plan, record: Record) -> bool:
    return len(record.submitted) < len(plan.jobs)


def _over_time(record: Record) -> str:
    head, *rows = trends.lines(record.samples)
    return _table(head, rows)


def _jobs(verdicts: Sequence[Verdict]) -> str:
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        row = rows[verdict.end.kind.name]
        row["all"] += 1
        row["own" if verdict.own else "explained" if verdict.why else "unexplained"] += 1
        row["again"] += bool(verdict.end.track is not None and verdict.end.track.now.restarts)
        if not verdict.own:
            row[f"{verdict.end.state}"] += 1
    others = {
        name: ", ".join(f"{count} {state}" for state, count in sorted(row.items()) if state.isupper())
        for name, row in rows.items()
    }
    head = ("kind", "jobs", "as it says", "after a requeue", "explained", "unexplained", "other ends")
    return _table(
        head,
        [
            (name, row["all"], row["own"], row["again"], row["explained"], row["unexplained"], others[name])
            for name, row in sorted(rows.items())
        ],
    )


def _faults(record: Record, verdicts: Sequence[Verdict]) -> str:
    done = Counter(fault.plan.kind for fault in record.injected)
    missed = Counter(fault.kind for fault in record.missed)
    touched, changed = Counter[str](), Counter[str]()
    for verdict in verdicts:
        kinds = {fault.plan.kind for fault in verdict.touched}
        touched.update(kinds)
        if not verdict.own:
            changed.update(kinds)
    return _table(
        ("fault", "injected", "nothing to hit", "jobs touched", "of these not as their kind says"),
        [(kind, done[kind], missed[kind], touched[kind], changed[kind]) for kind in sorted({*done, *missed})],
    )


def _attacks(attacks: Attacks) -> str:
    done = Counter(attack.name for attack in attacks.done)
    rows = []
    for name, attacked in (("during an attack", True), ("between attacks", False)):
        costs = sorted(start.cost_s for start in attacks.starts if start.attacked == attacked)
        if costs:
            rows.append((name, len(costs), f"{statistics.median(costs):.1f}", f"{costs[-1]:.1f}"))
    return "\n\n".join(
        (
            _table(("attack", "times"), sorted(done.items())),
            "What vhpcd cost the starts that no fault touched:",
            _table(("starts", "count", "median, s", "longest, s"), rows),
        )
    )


def _unexplained(verdict: Verdict) -> str:
    track = verdict.end.track
    seen = (
        " ".join(f"{s.state}/{s.restarts}/{s.reason}@{','.join(s.nodes)}" for s in track.seen)
        if track
        else ""
    )
    faults = ", ".join(f"{fault.plan.number} {fault.plan.kind}" for fault in verdict.touched) or "none"
    return (
        f"{verdict.end.name} ({sorted(track.ids) if track else ''}): "
        f"{verdict.end.wrong or 'it ran on the host'}; "
        f"faults: {faults}; seen: {seen}; comment: {verdict.end.comment!r}; output: {verdict.end.output!r}"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) or "none"
