# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML file: no scripts, nothing from elsewhere, pictures as inline SVG.

Texts of users, guests and nodes are in it: the template escapes all values, and control
characters are replaced before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vhpc_slurm import __version__
from vhpc_slurm.cli import output, pagetext
from vhpc_slurm.cli.host import picture
from vhpc_slurm.cli.jobs import reportdata, reportrows, runs, usagerows
from vhpc_slurm.cli.jobs.reportdata import JobReport
from vhpc_slurm.hardware import Reservation
from vhpc_slurm.model import HostInventory, NodeReport, Stage
from vhpc_slurm.model.lease import FAILED
from vhpc_slurm.terminal import printable

PICTURES = 16
"""Different placements that are drawn; nodes with the same one share a picture."""
DRAWN_NODES = 64
"""Nodes whose stages are drawn: those that took longest."""
NARROWEST = 0.4
"""Of a stage in the drawing, in percent of its width: also one that took no time is seen."""

ENVIRONMENT = Environment(
    loader=PackageLoader("vhpc_slurm.cli", "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    finalize=lambda value: printable(value, "\n") if type(value) is str else value,
)
ENVIRONMENT.filters |= {"breakable": pagetext.breakable, "brief": pagetext.brief}


@dataclass(frozen=True)
class Bar:
    """A stage in the drawing; ``x`` and ``width`` in percent of its width, the others in seconds."""

    stage: str
    began_s: float
    took_s: float
    x: float
    width: float
    tip: str
    failed: bool


@dataclass(frozen=True)
class Waterfall:
    """The stages of one phase by node, on a common scale; ``marks`` are (percent, seconds)."""

    title: str
    nodes: tuple[tuple[str, tuple[Bar, ...]], ...]
    marks: tuple[tuple[int, float], ...]


def render(found: JobReport) -> str:
    """The document, ending in a newline."""
    return ENVIRONMENT.get_template("report.html.j2").render(content(found))


def content(found: JobReport) -> dict[str, Any]:
    """The values of ``report_body.html.j2``; ``pictures`` are (nodes, SVG)."""
    slowest = sorted(found.timelines.values(), key=lambda line: -(line.ready_s or 1e9))
    drawn = {line.node for line in slowest[:DRAWN_NODES]}
    lines = [line for line in found.timelines.values() if line.node in drawn]
    phases: list[Waterfall] = []
    boots = [(line.node, line.boot) for line in lines]
    for title, stages in (("Boot", boots), ("Teardown", [(line.node, line.teardown) for line in lines])):
        if (fall := _waterfall(title, stages)) is not None:
            phases.append(fall)
    pictures, left_out = _pictures(found)
    return {
        "job_id": found.record.lease.generation.job_id,
        "version": __version__,
        "facts": reportrows.facts(found),
        "tables": runs.tables(found.runs),
        "numbers": runs.RIGHT,
        "guests": reportrows.guest_rows(found),
        "pictures": pictures,
        "left_out": left_out,
        "phases": phases,
        "hidden": len(found.timelines) - len(lines),
        "lines": reportdata.lines(found),
        "guest_head": reportrows.GUEST_HEAD,
        "usage_head": usagerows.HEAD,
        "usage": [usagerows.row(step) for step in found.usage.steps] if found.usage else [],
        "usage_lines": usagerows.lines(found.usage) if found.usage else [],
    }


def _pictures(found: JobReport) -> tuple[list[tuple[str, Markup]], int]:
    """(nodes, SVG) of each different placement, and how many are not drawn."""
    same: dict[bytes, list[NodeReport]] = {}
    for part in found.record.lease.allocation.nodes:
        one = found.reports.get(part.node)
        if one is None or one.host is None or not one.guests:
            continue
        guests = tuple(replace(guest, hostname="") for guest in one.guests)
        key: Any = (replace(one.host, node=""), guests)
        same.setdefault(msgspec.json.encode(key), []).append(one)
    groups = list(same.values())
    drawn = [(output.node_list(one.node for one in group), _draw(group[0])) for group in groups[:PICTURES]]
    return drawn, len(groups) - len(drawn)


def _draw(one: NodeReport) -> Markup:
    host: HostInventory | None = one.host
    assert host is not None
    reservations = [
        Reservation(
            generation=str(one.generation),
            guest=guest.index,
            cpus=tuple(sorted(guest.cpus)),
            cells=guest.cells,
            hugepage_kib=guest.hugepage_kib,
            devices=tuple(address for address, _ in guest.devices),
        )
        for guest in one.guests
    ]
    # picture.draw escapes all texts
    return Markup(picture.draw(host, reservations, f"guests on {one.node}"))  # noqa: S704


def _waterfall(title: str, lines: Sequence[tuple[str, Sequence[Stage]]]) -> Waterfall | None:
    every = [stage for _, stages in lines for stage in stages]
    if not every:
        return None
    origin = min(stage.began for stage in every)
    whole = max(max(stage.ended for stage in every) - origin, 0.001)

    def bar(node: str, stage: Stage) -> Bar:
        began, took = stage.began - origin, stage.ended - stage.began
        return Bar(
            stage.name,
            began,
            took,
            x=min(100 * began / whole, 100 - NARROWEST),
            width=max(100 * took / whole, NARROWEST),
            tip=f"{node} {stage.name}: from {began:.3f} s, {took:.3f} s {stage.detail}".rstrip(),
            failed=stage.detail.startswith(FAILED),
        )

    bars = ((node, tuple(bar(node, stage) for stage in stages)) for node, stages in lines if stages)
    marks = tuple((25 * part, part / 4 * whole) for part in range(5))
    return Waterfall(title, tuple(bars), marks)
