# SPDX-License-Identifier: Apache-2.0
"""Does anything grow while jobs come and go?  Pure functions over samples of daemons and files."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

RULE = """\
Samples are divided by the number of jobs that were submitted. The last third is compared with the middle
third. The first is compared with nothing: memory pools and caches fill, and daemons are killed.

- Memory and descriptors of a daemon grow if their median has become larger by more than a twentieth and by
  more than 1 MiB or 3 descriptors; files, processes and leases by more than a tenth and by more than a few.
  What varies with the jobs of the moment must also grow by more than twice its spread in the middle third
  (median absolute deviation).
- CPU time of a daemon grows if it has become larger by more than a quarter, both for a job and for a second,
  and by more than 2 ms for a job: some work is for jobs, and some is done once a minute.
- Timelines and reports of use that a node keeps may not be more than 510 each.
- SQLite keeps the file of vhpcd's database as large as it was once, so its size is divided by the most leases
  that it has held until then. The number of leases is judged by itself.
"""
DATABASE, PER_LEASE = "vhpcd's database", "KiB per lease"
FEWEST = 20
"""Samples of a third, at least, for a verdict: five minutes, of which one of high load is a small part."""
PARTS, PART, CPU_PART, CPU_MS = {"MiB": 0.05, "descriptors": 0.05}, 0.1, 0.25, 2.0
STEPS = {
    "MiB": 1.0,
    "KiB": 64.0,
    PER_LEASE: 1.0,
    "descriptors": 3.0,
    "files": 8.0,
    "processes": 4.0,
    "leases": 20.0,
}
"""By unit: a growth up to this is none."""
NOT_JUDGED = {"KiB of logs": "not rotated here", "files of Slurm": "not of vhpc"}
"""By unit: why its growth is shown and not judged."""
KEPT_MOST = 510
"""Timelines, and reports of use, of ended jobs on a node: Epilog keeps 500, and others may run just now."""
FLAT, GROWS = "flat", "GROWS"


@dataclass(frozen=True)
class Sample:
    """The values at one time.

    Attributes:
        at_s: seconds since the beginning of the run.
        jobs: submitted so far.
        held: by name and unit; what could not be read is missing.
        cpu_s: CPU time that daemons have used since they began.
        pids: of the daemons, by their name.
    """

    at_s: float
    jobs: int
    held: dict[tuple[str, str], float]
    cpu_s: dict[str, float]
    pids: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Trend:
    """One row: values at points of the run, medians of two thirds, and the verdict."""

    name: str
    unit: str
    points: tuple[float | None, ...]
    middle: float | None
    last: float | None
    verdict: str

    @property
    def bad(self) -> bool:
        """Whether it grows."""
        return self.verdict.startswith(GROWS)


def thirds(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Samples of the middle and of the last third of the jobs that were submitted."""
    jobs = max((sample.jobs for sample in samples), default=0)
    middle = [sample for sample in samples if jobs / 3 <= sample.jobs < 2 * jobs / 3]
    return middle, [sample for sample in samples if sample.jobs >= 2 * jobs / 3]


def points(samples: Sequence[Sample], count: int = 10) -> list[Sample]:
    """So many samples at equal distances, the last one included."""
    if len(samples) <= count:
        return list(samples)
    return [samples[(number + 1) * len(samples) // count - 1] for number in range(count)]


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """All rows."""
    samples = list(_with_database_per_lease(samples))
    names = list(dict.fromkeys(name for sample in samples for name in sample.held))
    daemons = list(dict.fromkeys(name for sample in samples for name in sample.cpu_s))
    return [*(_held(samples, *name) for name in names), *(_cpu(samples, name) for name in daemons)]


def _with_database_per_lease(samples: Sequence[Sample]) -> Iterator[Sample]:
    most = 0.0
    for sample in samples:
        held = dict(sample.held)
        most = max(most, held.get((DATABASE, "leases"), 0.0))
        size = held.pop((DATABASE, "KiB"), None)
        if size is not None and most:
            held[DATABASE, PER_LEASE] = size / most
        yield replace(sample, held=held)


def _held(samples: Sequence[Sample], name: str, unit: str) -> Trend:
    def value(sample: Sample) -> float | None:
        return sample.held.get((name, unit))

    middle, last = (_median(part, value) for part in thirds(samples))
    shown = tuple(value(sample) for sample in points(samples))
    if unit == "kept":
        most = max((found for found in map(value, samples) if found is not None), default=0.0)
        verdict = f"{GROWS}: more than {KEPT_MOST}" if most > KEPT_MOST else f"at most {KEPT_MOST}"
    elif unit in NOT_JUDGED:
        verdict = NOT_JUDGED[unit]
    else:
        step = max(STEPS[unit], 2 * _spread(thirds(samples)[0], value))
        verdict = _reason_not_to_judge(samples, name) or _verdict(middle, last, PARTS.get(unit, PART), step)
    return Trend(name, unit, shown, middle, last, verdict)


def _cpu(samples: Sequence[Sample], name: str) -> Trend:
    def cost(part: Sequence[Sample], per: Callable[[Sample], float]) -> float | None:
        """Milliseconds for a job or a second, between the first and the last of some samples."""
        known = [sample for sample in part if name in sample.cpu_s]
        count = per(known[-1]) - per(known[0]) if known else 0
        if not count or known[0].pids[name] != known[-1].pids[name]:
            return None
        return 1e3 * (known[-1].cpu_s[name] - known[0].cpu_s[name]) / count

    def of_job(sample: Sample) -> float:
        return sample.jobs

    middle, last = (cost(part, of_job) for part in thirds(samples))
    before, after = (cost(part, lambda sample: sample.at_s) for part in thirds(samples))
    seen = points(samples)
    shown = tuple(cost(pair, of_job) for pair in zip(seen[:1] + seen[:-1], seen, strict=True))
    verdict = _verdict(middle, last, CPU_PART, CPU_MS)
    if verdict == GROWS:
        verdict = _verdict(before, after, CPU_PART, 0.0)
    return Trend(name, "CPU ms/job", shown, middle, last, _reason_not_to_judge(samples, name) or verdict)


def _reason_not_to_judge(samples: Sequence[Sample], name: str) -> str:
    middle, last = thirds(samples)
    if min(len(middle), len(last)) < FEWEST:
        return "too few samples"
    pids = {sample.pids[name] for sample in (*middle, *last) if name in sample.pids}
    return "restarted" if len(pids) > 1 else ""


def _verdict(middle: float | None, last: float | None, part: float, step: float) -> str:
    if middle is None or last is None:
        return "not seen"
    return GROWS if last - middle > max(part * middle, step) else FLAT


def _median(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    known = [found for found in map(value, samples) if found is not None]
    return statistics.median(known) if known else None


def _spread(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float:
    """The median absolute deviation; a quarter of what something gains that grows evenly."""
    known = [found for found in map(value, samples) if found is not None]
    middle = statistics.median(known or [0.0])
    return statistics.median([abs(one - middle) for one in known] or [0.0])


def lines(samples: Sequence[Sample]) -> Iterator[tuple[str, ...]]:
    """Head and rows of a table."""
    seen = points(samples)
    yield ("jobs", "", *(str(sample.jobs) for sample in seen), "middle third", "last third", "verdict")
    yield ("minutes", "", *(f"{sample.at_s / 60:.1f}" for sample in seen), "", "", "")
    for row in trends(samples):
        values = (*row.points, row.middle, row.last)
        yield (row.name, row.unit, *("" if value is None else _short(value) for value in values), row.verdict)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
