# SPDX-License-Identifier: Apache-2.0
"""All results as a picture (SVG): a bar for each, as a part of its target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from vhpcbench.runner import Outcome

LABEL, LEFT, WIDTH, RIGHT = 150, 520, 300, 285
"""Columns: where the result's name begins, where the bar begins, how wide it can be, room for figures."""
ROW, TOP, FOOT, LINE = 20, 96, 24, 16
SCALE = 2.0
"""Largest part of a target that has a bar of its whole length; longer bars are cut."""
LONGEST = 160
"""Characters of a line that fit into the picture's width."""


def draw(machine: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """The picture; the same results give the same text."""
    rows = [row for outcome in outcomes for row in _rows(outcome)]
    for number, row in enumerate(rows):
        row["y"] = TOP + ROW * number
    absent = [
        f"{one.benchmark.name}: {one.status}{f': {one.reason}' if one.reason else ''}"
        for one in outcomes
        if not one.judged
    ]
    foot = TOP + ROW * len(rows)
    # the template is the project's own; all values are escaped
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("plot.svg.j2").render(
        width=LEFT + WIDTH + RIGHT,
        height=foot + FOOT + LINE * (len(absent) + 1),
        title=f"Benchmarks of vhpc, {machine['date'][:10]}",
        lines=[_shortened(line) for line in _lines(machine)],
        ticks=[(_x(part), f"{part:g}") for part in (0.0, 0.5, 1.0, 1.5, 2.0)],
        rows=rows,
        absent=[_shortened(line) for line in absent],
        top=TOP,
        foot=foot,
        label=LABEL,
        left=LEFT,
        limit=_x(1.0),
        figures=LEFT + WIDTH + 10,
    )


def _lines(machine: dict[str, Any]) -> tuple[str, str]:
    commit = (machine["commit"] or "unknown")[:12] + (" with changes" if machine["dirty"] else "")
    return (
        f"{machine['cpus']} CPUs {machine['cpu']}, {machine['memory_mib'] / 1024:.0f} GiB, "
        f"guests: {machine['guests']}, load {machine['load_before']:.1f} before and "
        f"{machine['load_after']:.1f} after, commit {commit}",
        "Bars: results as parts of their targets. A bar beyond the line at 1 misses its target. "
        "Longer bars are cut.",
    )


def _rows(outcome: Outcome) -> list[dict[str, Any]]:
    return [
        {
            "name": "" if number else outcome.benchmark.name,
            "label": one["name"],
            "verdict": "met" if one["met"] else "missed",
            "length": round(_x(SCALE if one["part"] is None else one["part"]) - LEFT, 1),
            "figures": f"{figure(one)}, {one['target']}: {'met' if one['met'] else 'missed'}",
        }
        for number, one in enumerate(outcome.judged)
    ]


def figure(judged: dict[str, Any]) -> str:
    """A result with three digits and its unit."""
    value = judged["value"]
    digits = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{digits} {judged['unit']}".rstrip()


def _x(part: float) -> float:
    return LEFT + WIDTH / SCALE * min(max(part, 0.0), SCALE)


def _shortened(line: str) -> str:
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
