# SPDX-License-Identifier: Apache-2.0
"""The report as a picture (SVG): a bar of efficiency for each metric.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from vhpc_slurm.bench.compare import Comparison, figure, part
from vhpc_slurm.bench.published import published
from vhpc_slurm.bench.report import Report
from vhpc_slurm.terminal import printable

LEFT, WIDTH, RIGHT = 190, 420, 260  # labels, bars, figures
ROW, TOP, BOTTOM = 24, 74, 46
LEAST_SCALE, MOST_SCALE = 1.2, 3.0
LINE, TITLE = 140, 95
"""Most characters of a line, and of the title, that fit into the picture's width."""
STYLE = """text{font:11px 'DejaVu Sans',Verdana,sans-serif;fill:#222}
.head{font-weight:bold;font-size:14px}.warn{fill:#b3261e}.faint{fill:#666}.bar{fill:#4e79a7}
.spread{stroke:#222}.native{stroke:#59a14f;stroke-width:1.5}.published{stroke:#f28e2b;stroke-width:3}
.grid{stroke:#ddd}"""


def draw(done: Report) -> str:
    """The picture, ending in a newline; the same report gives the same text."""
    rows = [(one.test.name, comparison) for one in done.tests for comparison in one.comparisons]
    absent = [one for one in done.tests if one.status != "measured"]
    highest = max((comparison.high for _, comparison in rows), default=1.0)
    scale = WIDTH / min(MOST_SCALE, max(LEAST_SCALE, highest * 1.05))
    foot = TOP + ROW * len(rows)
    height = foot + BOTTOM + 16 * len(absent)
    width = LEFT + WIDTH + RIGHT
    parts = [*_head(done), *_axis(scale, foot)]
    for number, (test, comparison) in enumerate(rows):
        parts += _row(done, test, comparison, scale, TOP + ROW * number)
    parts.append(_line(LEFT + scale, TOP - 6, LEFT + scale, foot + 4, "native"))  # not hidden by bars
    for number, one in enumerate(absent):
        line = f"{one.test.name}: {one.status}: {one.problems[0]}"
        parts.append(_text(10, foot + BOTTOM + 16 * number, _shortened(line, LINE), "faint"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">\n<style>{STYLE}</style>\n'
        '<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _head(done: Report) -> Iterator[str]:
    title = f"Efficiency of guests: {done.wish.image} on {done.nodes or 'no node'}"
    yield _text(10, 20, _shortened(title, TITLE), "head")
    yield _text(
        10,
        38,
        f"bars: ratio of the medians of {done.wish.rounds} rounds; black: lowest and highest round; "
        "green: native speed; orange: published",
        "faint",
    )
    if done.emulated:
        yield _text(
            10, 56, "EMULATED GUESTS (no KVM): these figures mean nothing for a site with KVM", "warn"
        )


def _axis(scale: float, foot: int) -> Iterator[str]:
    step = 0.2 if scale * 0.2 > 30 else 0.5
    ticks = int(WIDTH / scale / step + 1e-9)
    for number in range(ticks + 1):
        x = LEFT + scale * step * number
        yield _line(x, TOP - 6, x, foot + 4, "grid")
        yield _text(x, foot + 18, f"{step * number:.1f}", anchor="middle")
    yield _text(LEFT + WIDTH + 10, TOP - 10, "efficiency (guest, native)", "faint")


def _row(done: Report, test: str, comparison: Comparison, scale: float, y: int) -> Iterator[str]:
    metric = comparison.metric
    middle = y + ROW / 2 - 3

    def at(value: float) -> float:
        return LEFT + min(value * scale, WIDTH)

    label = test if metric.title == test else f"{test}: {metric.title}"
    yield _text(LEFT - 8, y + 13, label, anchor="end")
    length = at(comparison.efficiency) - LEFT
    yield f'<rect class="bar" x="{LEFT}" y="{y + 2}" width="{length:.1f}" height="{ROW - 9}"/>'
    yield _line(at(comparison.low), middle, at(comparison.high), middle, "spread")
    for value in (comparison.low, comparison.high):
        yield _line(at(value), middle - 4, at(value), middle + 4, "spread")
    elsewhere = published(test, metric.key, done.wish.nodes)
    if elsewhere is not None:
        x = at(elsewhere.efficiency)
        yield _line(x, y, x, y + ROW - 5, "published")
    medians = f"{figure(comparison.guest.median)}, {figure(comparison.native.median)} {metric.unit}"
    yield _text(LEFT + WIDTH + 10, y + 13, f"{part(comparison.efficiency)} ({medians})")


def _shortened(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    look = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:g}" y="{y:g}"{look}>{escape(printable(words))}</text>'
