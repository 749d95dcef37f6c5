# SPDX-License-Identifier: Apache-2.0
"""A host as a picture (SVG): sockets, cells, cores in their L3 caches, devices below root complexes.

CPUs and devices that a guest holds have the guest's colour, everything else
is white or grey.  Pure: the same host and reservations give the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from vhpc_slurm.cli.host import hostview
from vhpc_slurm.cli.host.hostview import CellGroup, CellView, Complex, FunctionTree
from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.hardware import PciFunction, Reservation
from vhpc_slurm.model import HostCell, HostCpu, HostInventory
from vhpc_slurm.terminal import printable

PAD = 10
LINE = 16  # height of a line of text
CORE_WIDTH, THREAD_HEIGHT = 28, 14
DEVICE_HEIGHT = 20
CELL_WIDTH = 480
ACROSS = 4  # sockets per row
VF_WIDTH, VFS_ACROSS = 34, 8
CHAR, SMALL_CHAR = 6.2, 5.2  # width of a character of 11 and of 9 px sans-serif, generously
BAR = 9
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#edc948")
WHITE_ON = COLOURS[:1]
"""Colours of guests on which white text is readable; it is dark on the others."""
CLASS_COLOURS = {0x03: "#d8efd3", 0x02: "#d6e4f5", 0x01: "#fbe8c8", 0x12: "#d8efd3", 0x0B: "#d8efd3"}
PLAIN = "#f0f0f0"
BRIDGE = "#e2e2e2"
STYLE = """text{font:11px 'DejaVu Sans',Verdana,sans-serif;fill:#222}
.head{font-weight:bold;font-size:14px}.name{font-weight:bold}.small{font-size:9px}.faint{fill:#595959}
.on{fill:#fff}.dark{fill:#111}.box{fill:#fff;stroke:#555}.cell{fill:#fafafa;stroke:#999}.l3{fill:none;stroke:#bbb}
.cpu{stroke:#888;stroke-width:.7}.root{fill:#fff;stroke:#aaa;stroke-dasharray:3 2}
.edge{stroke:#999;fill:none}"""


@dataclass
class Canvas:
    """SVG elements in the order of their drawing."""

    held_cpus: dict[int, int]
    held_devices: dict[str, int]
    reservations: Sequence[Reservation]
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, kind: str = "", fill: str = "") -> None:
        """A rectangle, of a class of the style sheet or of a colour."""
        look = (f' class="{kind}"' if kind else "") + (f' style="fill:{fill}"' if fill else "")
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"{look}/>')

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "", room: float = 0) -> None:
        """A line of text; if it does not fit into ``room``, it is cut and its tooltip has the full text."""
        look = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
        fits = int(room / CHAR) if room else len(words)
        shown = words if len(words) <= fits else words[: max(1, fits - 1)] + "…"
        tip = f"<title>{_clean(words)}</title>" if shown != words else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{look}>{_clean(shown)}{tip}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """An edge of the PCI tree: down, then right."""
        self.parts.append(f'<path class="edge" d="M{x1:g} {y1:g}V{y2:g}H{x2:g}"/>')

    def reserve(self) -> int:
        """Reserve a place for an element below the next ones."""
        self.parts.append("")
        return len(self.parts) - 1

    def under(self, place: int, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw a box in a reserved place."""
        self.box(x, y, width, height, kind)
        self.parts[place] = self.parts.pop()


def draw(host: HostInventory, reservations: Sequence[Reservation], headline: str) -> str:
    """The picture of a host, ending in a newline."""
    view = hostview.arrange(host)
    canvas = Canvas(
        {cpu: number for number, reservation in enumerate(reservations) for cpu in reservation.cpus},
        {
            address: number
            for number, reservation in enumerate(reservations)
            for address in reservation.devices
        },
        reservations,
    )
    width = PAD + min(ACROSS, len(view.groups)) * (CELL_WIDTH + 4 * PAD)
    canvas.text(PAD, 22, headline, "head")
    y = 34 + _legend(canvas, PAD, 34, width - 2 * PAD)
    for first in range(0, len(view.groups), ACROSS):
        row = view.groups[first : first + ACROSS]
        heights = [
            _group(canvas, PAD + number * (CELL_WIDTH + 4 * PAD), y, group)
            for number, group in enumerate(row)
        ]
        y += max(heights) + PAD
    if view.offline:
        canvas.text(PAD, y + 12, f"offline: CPUs {format_cpu_list(view.offline)}", "faint")
        y += LINE + 4
    y += _distances(canvas, PAD, y, host)
    if view.hidden:
        canvas.text(PAD, y + 12, f"{view.hidden} PCI functions of the platform itself are not drawn", "faint")
        y += LINE + 4
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{y + PAD:g}" '
        f'viewBox="0 0 {width:g} {y + PAD:g}">\n<style>{STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n'
    )
    return head + "\n".join(part for part in canvas.parts if part) + "\n</svg>\n"


def _clean(text: str) -> str:
    return escape(printable(text))


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _ink(number: int) -> str:
    """The class of text on the colour of a guest."""
    return "on" if _colour(number) in WHITE_ON else "dark"


def _legend(canvas: Canvas, x: float, y: float, width: float) -> float:
    """The legend of guests and their resources; returns its height."""
    for number, reservation in enumerate(canvas.reservations):
        top = y + number * LINE
        canvas.box(x, top, 12, 12, "cpu", _colour(number))
        canvas.text(
            x + 18,
            top + 10,
            f"{hostview.holder(reservation)}: {hostview.describe(reservation)}",
            room=width - 18,
        )
    return len(canvas.reservations) * LINE + (6 if canvas.reservations else 0)


def _group(canvas: Canvas, x: float, y: float, group: CellGroup) -> float:
    place, width = canvas.reserve(), CELL_WIDTH + 2 * PAD
    canvas.text(x + PAD, y + 18, group.title, "head")
    height = 28.0
    for cell in group.cells:
        height += _cell(canvas, x + PAD, y + height, cell) + PAD
    canvas.under(place, x, y, width, height, "box")
    return height


def _cell(canvas: Canvas, x: float, y: float, view: CellView) -> float:
    place, inner = canvas.reserve(), CELL_WIDTH - 2 * PAD
    if view.cell is None:
        canvas.text(x + PAD, y + 15, "without a NUMA cell", "name")
        height = 24.0
    else:
        cell = view.cell
        held = sum(
            mib
            for reservation in canvas.reservations
            for number, mib in reservation.cells
            if number == cell.cell
        )
        words = f"{hostview.mib(held)} of " if held else ""
        words += f"{hostview.mib(cell.memory_mib)}{' held' if held else ''}"
        words += f" of GPU {cell.gpu}" if cell.gpu else ""
        canvas.text(x + PAD, y + 15, f"cell {cell.cell}", "name")
        canvas.text(x + PAD + 60, y + 15, words)
        pools = [
            f"{hostview.kib(size)} pages: {free} of {total} free"
            for size, total, free in cell.hugepages
            if total
        ]
        canvas.text(x + PAD + inner, y + 15, ", ".join(pools), "faint", "end", inner - 200)
        _memory(canvas, x + PAD, y + 21, cell)
        height = 21.0 + BAR + 6
    if view.cores:
        height += _cores(canvas, x + PAD, y + height, view) + 6
    for root in view.complexes:
        height += _complex(canvas, x + PAD, y + height, root) + 6
    canvas.under(place, x, y, CELL_WIDTH, height, "cell")
    return height


def _memory(canvas: Canvas, x: float, y: float, cell: HostCell) -> None:
    """Memory as a bar; the memory of guests in this cell has their colours."""
    width, at = CELL_WIDTH - 2 * PAD, x
    canvas.box(x, y, width, BAR, "cpu", "#fff")
    for number, reservation in enumerate(canvas.reservations):
        mib = sum(size for other, size in reservation.cells if other == cell.cell)
        part = min(width * mib / max(1, cell.memory_mib), x + width - at)
        if part > 0:
            canvas.box(at, y, part, BAR, "cpu", _colour(number))
            at += part


# --- cores --------------------------------------------------------------------------


def _cores(canvas: Canvas, x: float, y: float, view: CellView) -> float:
    """Cores as columns of their threads, those of an L3 cache in one frame; frames flow."""
    width = CELL_WIDTH - 2 * PAD
    at, top, tallest = x, y, 0.0
    for label, cores in _by_l3(view):
        across = max(1, min(len(cores), int((width - 8) // (CORE_WIDTH + 3))))
        rows = [cores[first : first + across] for first in range(0, len(cores), across)]
        threads = max(len(core) for core in cores)
        frame = max(across * (CORE_WIDTH + 3) + 5, len(label) * SMALL_CHAR + 8)
        height = (12 if label else 4) + len(rows) * (threads * THREAD_HEIGHT + 4)
        if at > x and at + frame > x + width:
            at, top, tallest = x, top + tallest + 4, 0.0
        canvas.box(at, top, frame, height, "l3")
        if label:
            canvas.text(at + 4, top + 10, label, "small faint")
        for number, row in enumerate(rows):
            below = top + (12 if label else 4) + number * (threads * THREAD_HEIGHT + 4)
            for column, core in enumerate(row):
                _core(canvas, at + 4 + column * (CORE_WIDTH + 3), below, core)
        at, tallest = at + frame + 4, max(tallest, height)
    return top + tallest - y


def _core(canvas: Canvas, x: float, y: float, core: Sequence[HostCpu]) -> None:
    for thread, cpu in enumerate(core):
        top = y + thread * THREAD_HEIGHT
        number = canvas.held_cpus.get(cpu.os_cpu)
        canvas.box(x, top, CORE_WIDTH, THREAD_HEIGHT, "cpu", "#fff" if number is None else _colour(number))
        kind = "small" if number is None else f"small {_ink(number)}"
        canvas.text(x + CORE_WIDTH / 2, top + 10, str(cpu.os_cpu), kind, "middle")


def _by_l3(view: CellView) -> Iterable[tuple[str, list[tuple[HostCpu, ...]]]]:
    caches = [cache for cache in view.caches if cache.level == 3]
    left = list(view.cores)
    for cache in caches:
        cpus = set(cache.cpus)
        inside = [core for core in left if core[0].os_cpu in cpus]
        left = [core for core in left if core[0].os_cpu not in cpus]
        if inside:
            yield f"L3 {hostview.kib(cache.size_kib)}" if cache.size_kib else "L3", inside
    if left:
        yield "", left


# --- devices ------------------------------------------------------------------------


def _complex(canvas: Canvas, x: float, y: float, root: Complex) -> float:
    place, width = canvas.reserve(), CELL_WIDTH - 2 * PAD
    canvas.text(x + 6, y + 13, root.name, "name")
    height = 20 + _ports(canvas, x + 6, y + 20, root.ports, width - 12)
    canvas.under(place, x, y, width, height + 2, "root")
    return height + 2


def _ports(canvas: Canvas, x: float, y: float, ports: Sequence[FunctionTree], width: float) -> float:
    """Functions one below the other; below a bridge they are indented, chains of bridges share a line."""
    height = 0.0
    for port in ports:
        chain = [port]
        while len(chain[-1].below) == 1 and chain[-1].function.bridge and chain[-1].below[0].function.bridge:
            chain.append(chain[-1].below[0])
        last, top = chain[-1], y + height
        if last.function.bridge:
            names = " / ".join(hostview.short(p.function.address) for p in chain)
            what = "switch" if len(last.below) > 1 and len(chain) > 1 else "bridge"
            _pill(canvas, x, top, width, f"{names} {what}", last.function, BRIDGE)
        else:
            _pill(canvas, x, top, width, _words(last.function), last.function, _class_colour(last.function))
        height += DEVICE_HEIGHT
        height += _vfs(canvas, x + 12, y + height, last.vfs)
        if last.below:
            inner = y + height
            edges = _tops(last.below)
            used = _ports(canvas, x + 16, inner, last.below, width - 16)
            for edge in edges:
                canvas.line(x + 6, top + DEVICE_HEIGHT - 2, x + 16, inner + edge + DEVICE_HEIGHT / 2 - 1)
            height += used
    return height


def _tops(ports: Sequence[FunctionTree]) -> list[float]:
    """Where each of these ports will begin, counted from the first."""
    tops, at = [], 0.0
    for port in ports:
        tops.append(at)
        at += _height(port)
    return tops


def _height(port: FunctionTree) -> float:
    last = port
    while len(last.below) == 1 and last.function.bridge and last.below[0].function.bridge:
        last = last.below[0]
    return DEVICE_HEIGHT + _vf_height(last.vfs) + sum(_height(inner) for inner in last.below)


def _pill(
    canvas: Canvas, x: float, y: float, width: float, words: str, function: PciFunction, colour: str
) -> None:
    number = canvas.held_devices.get(function.address)
    canvas.box(x, y, width, DEVICE_HEIGHT - 3, "cpu", colour if number is None else _colour(number))
    trained = hostview.link(function.link)
    kind = _ink(number) if number is not None else ""
    room = len(trained) * SMALL_CHAR + 10 if trained else 0
    canvas.text(x + 5, y + 12.5, words, kind, room=width - 10 - room)
    if trained:
        canvas.text(x + width - 5, y + 12.5, trained, f"small {kind or 'faint'}", "end")


def _vfs(canvas: Canvas, x: float, y: float, vfs: Sequence[PciFunction]) -> float:
    """Virtual functions as small boxes with slot and function number."""
    for number, vf in enumerate(vfs):
        left, top = x + number % VFS_ACROSS * VF_WIDTH, y + number // VFS_ACROSS * (THREAD_HEIGHT + 2)
        held = canvas.held_devices.get(vf.address)
        colour = _class_colour(vf) if held is None else _colour(held)
        canvas.box(left, top, VF_WIDTH - 3, THREAD_HEIGHT, "cpu", colour)
        words = vf.address.rpartition(":")[2]
        kind = "small" if held is None else f"small {_ink(held)}"
        canvas.text(left + (VF_WIDTH - 3) / 2, top + 10, words, kind, "middle")
    return _vf_height(vfs)


def _vf_height(vfs: Sequence[PciFunction]) -> float:
    return -(-len(vfs) // VFS_ACROSS) * (THREAD_HEIGHT + 2) + (2 if vfs else 0)


def _words(function: PciFunction) -> str:
    parts = [hostview.kind(function), *function.names]
    if not function.names:
        parts.append(hostview.maker(function))
    if function.driver:
        parts.append(function.driver)
    if function.iommu_group is not None:
        parts.append(f"group {function.iommu_group}")
    return f"{hostview.short(function.address)} {' · '.join(parts)}"


def _class_colour(function: PciFunction) -> str:
    return CLASS_COLOURS.get(function.class_code >> 16, PLAIN)


# --- distances ----------------------------------------------------------------------


def _distances(canvas: Canvas, x: float, y: float, host: HostInventory) -> float:
    """The matrix of distances; nothing where there is one cell."""
    if len(host.cells) < 2:
        return 0
    canvas.text(x, y + 12, "distances between NUMA cells", "name")
    step, top = 30, y + 20
    for column, cell in enumerate(host.cells):
        canvas.text(x + (column + 1.5) * step, top + 11, str(cell.cell), "name", "middle")
    for row, cell in enumerate(host.cells):
        line = top + (row + 1) * LINE
        canvas.text(x + step / 2, line + 11, str(cell.cell), "name", "middle")
        values = dict(cell.distances)
        for column, other in enumerate(host.cells):
            words = str(values.get(other.cell, "?"))
            canvas.text(x + (column + 1.5) * step, line + 11, words, "", "middle")
    return 20 + (len(host.cells) + 1) * LINE + 8
