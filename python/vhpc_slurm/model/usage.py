# SPDX-License-Identifier: Apache-2.0
"""Usage of programs in guests, as the guests' kernels measured it.

A figure that was not measured is None, and never zero. A guest can only lie about its own job,
within the bounds that its node checks.
"""

from __future__ import annotations

from collections.abc import Iterable

from vhpc_slurm.model.job import Generation
from vhpc_slurm.record import Record

FIGURE_MAX = 2**53
"""A larger figure counts as not measured: 285 years of CPU time, 9 PB."""
SUM_MAX = 2**63 - 1
"""Maximum of a sum: JSON has no larger integers."""


class Figures(Record, frozen=True):
    """Resources that processes have used.

    Attributes:
        cpu_us: CPU time in microseconds.
        user_us: the part in programs.
        system_us: the part in the kernel.
        peak_bytes: most memory at a time, with the cache of files and files of tmpfs. In sums: the sum of
            the peaks.
        rss_bytes: memory of the largest process. In sums: the largest of all.
        read_bytes: read from block devices: the image and the guest's disk, not shared folders (SharedIo).
        written_bytes: written to block devices.
        oom_kills: processes that were killed for memory.
    """

    cpu_us: int | None = None
    user_us: int | None = None
    system_us: int | None = None
    peak_bytes: int | None = None
    rss_bytes: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    oom_kills: int | None = None


class StepUsage(Record, frozen=True):
    """One step in one guest, or the sum of its guests; ``tasks`` is None where they are not counted."""

    step: str
    figures: Figures
    tasks: int | None = None


class SharedIo(Record, frozen=True):
    """Bytes that a guest has moved to and from the files of shared folders, as its node counts them.

    Attributes:
        read_bytes: read from these files. Data in the guest's memory was read once.
        written_bytes: written to them.
    """

    read_bytes: int
    written_bytes: int


class GpuUsage(Record, frozen=True):
    """One GPU of a guest, while the guest ran.

    Attributes:
        address: of PCI, in the guest.
        busy_e4: mean use in hundredths of a per cent.
        memory_bytes: most memory in use at a time.
        power_mw: mean power in milliwatts.
    """

    address: str
    busy_e4: int | None = None
    memory_bytes: int | None = None
    power_mw: int | None = None


class GuestUsage(Record, frozen=True):
    """One guest of a node.

    Attributes:
        index: of the guest on its node.
        whole: all programs of the job together; ``peak_bytes`` is their most memory at a time.
        steps: by Slurm's name; ``other`` for programs without a step, ``ssh`` for those that ssh started.
        memory_kib: that the guest's kernel has.
        missing: why there are no figures; empty if there are some.
        shared: shared folders. The node measures it, so it may be there when the guest has no figures.
        gpus: those whose driver has counters.
        gpus_missing: why figures of GPUs are missing; empty: they are not.
    """

    index: int
    whole: Figures = Figures()
    steps: tuple[StepUsage, ...] = ()
    memory_kib: int | None = None
    missing: str = ""
    shared: SharedIo | None = None
    gpus: tuple[GpuUsage, ...] = ()
    gpus_missing: str = ""


class NodeUsage(Record, frozen=True):
    """The usage of a generation in the guests of a node."""

    generation: Generation
    node: str
    guests: tuple[GuestUsage, ...]


class JobUsage(Record, frozen=True):
    """The sum of nodes.

    Attributes:
        whole: of all guests that have figures.
        steps: of the same, in Slurm's order.
        guests: number of guests.
        missing: (node, index, why) of guests without figures.
        shared: shared folders of these guests; None if it is not known of one.
        so_far_s: seconds since the oldest figure was measured, if the programs may have used more since;
            None: all figures are those of the end.
        gpus: (node, index, GPU).
        gpus_missing: (node, index, why) of guests that lack figures of GPUs.
    """

    whole: Figures
    steps: tuple[StepUsage, ...]
    guests: int
    missing: tuple[tuple[str, int, str], ...] = ()
    shared: SharedIo | None = None
    so_far_s: float | None = None
    gpus: tuple[tuple[str, int, GpuUsage], ...] = ()
    gpus_missing: tuple[tuple[str, int, str], ...] = ()


def total(figures: Iterable[Figures]) -> Figures:
    """The sum. A figure that one of them lacks is None; none at all is Figures()."""
    found = list(figures)
    sums: dict[str, int | None] = {}
    for name in Figures.__struct_fields__:
        values = [getattr(one, name) for one in found]
        known = [value for value in values if value is not None]
        together = max if name == "rss_bytes" else sum
        sums[name] = min(together(known), SUM_MAX) if known and len(known) == len(values) else None
    return Figures(**sums)


def whole_of(nodes: Iterable[NodeUsage]) -> Figures:
    """The sum of all guests that have figures."""
    return total(guest.whole for node in nodes for guest in node.guests if not guest.missing)


def shared_of(guests: Iterable[GuestUsage]) -> SharedIo | None:
    """The sum of guests; None if a guest that has figures lacks this one, or none has it."""
    found = [guest.shared for guest in guests if guest.shared is not None or not guest.missing]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    return shared_total((one.read_bytes, one.written_bytes) for one in known)


def shared_total(counts: Iterable[tuple[int, int]]) -> SharedIo:
    """The sum of bytes read and bytes written."""
    read = written = 0
    for one in counts:
        read, written = min(read + one[0], SUM_MAX), min(written + one[1], SUM_MAX)
    return SharedIo(read, written)


def job_usage(nodes: Iterable[NodeUsage], so_far_s: float | None = None) -> JobUsage:
    """The sum of what nodes report of one generation; ``so_far_s`` as in JobUsage."""
    reported = list(nodes)
    steps: dict[str, list[StepUsage]] = {}
    missing: list[tuple[str, int, str]] = []
    guests = 0
    for node in reported:
        for guest in node.guests:
            guests += 1
            if guest.missing:
                missing.append((node.node, guest.index, guest.missing))
                continue
            for step in guest.steps:
                steps.setdefault(step.step, []).append(step)
    summed = [_step(name, found) for name, found in steps.items()]
    shared = shared_of(guest for node in reported for guest in node.guests)
    every = [(node.node, guest) for node in reported for guest in node.guests]
    return JobUsage(
        whole_of(reported),
        tuple(sorted(summed, key=_order)),
        guests,
        tuple(missing),
        shared,
        so_far_s,
        tuple((node, guest.index, gpu) for node, guest in every for gpu in guest.gpus),
        tuple((node, guest.index, guest.gpus_missing) for node, guest in every if guest.gpus_missing),
    )


def _step(name: str, found: list[StepUsage]) -> StepUsage:
    tasks = [one.tasks for one in found if one.tasks is not None]
    return StepUsage(name, total(one.figures for one in found), sum(tasks) if tasks else None)


def _order(step: StepUsage) -> tuple[bool, int, str]:
    """The script before numbered steps, and these before others, as sacct shows them."""
    number = int(step.step) if step.step.isdecimal() else -1
    return (step.step in ("other", "ssh"), number, step.step)
