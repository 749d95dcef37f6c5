# SPDX-License-Identifier: Apache-2.0
"""Evaluation of all runs: comparisons, tests without a result, warnings.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vhpc_slurm.bench.catalogue import Benchmark
from vhpc_slurm.bench.compare import Comparison, compare
from vhpc_slurm.bench.jobfolder import Outcome, Side
from vhpc_slurm.bench.published import SUMMARY, published
from vhpc_slurm.bench.run import Run
from vhpc_slurm.bench.wish import Wish

EMULATED = "TCGTCGTCGTCG"
ANSWER_TOLERANCE = 1e-6
"""Relative difference of results that should be the same: ranks may add in another order."""
SIDES: tuple[Side, Side] = ("native", "guest")


@dataclass(frozen=True)
class Result:
    """One test.

    Attributes:
        status: measured: at least one round has both figures; missing: a program or
            library is not installed; failed: anything else.
        comparisons: of each metric that was measured on both sides.
        problems: why it has no figures, or has them of fewer rounds; one line each.
        versions: the program natively and in the guests, empty where unknown.
    """

    test: Benchmark
    status: Literal["measured", "missing", "failed"]
    comparisons: tuple[Comparison, ...] = ()
    problems: tuple[str, ...] = ()
    versions: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Report:
    """One call of ``vhpc bench``."""

    wish: Wish
    tests: tuple[Result, ...]
    nodes: str
    ranks: str
    machines: dict[Side, dict[str, str]]
    emulated: bool
    warnings: tuple[str, ...]
    failure: str = ""
    folder: str = ""

    @property
    def passed(self) -> bool:
        """Whether everything ran: a missing program is no failure unless the caller named its test."""
        allowed = ("measured",) if self.wish.named else ("measured", "missing")
        return not self.failure and all(
            one.status in allowed and not (one.status == "measured" and one.problems) for one in self.tests
        )


def report(wish: Wish, runs: Sequence[Run], failure: str = "") -> Report:
    """The report on all jobs that have ended.

    Args:
        wish: what was asked for.
        runs: their results.
        failure: why the runs ended early; empty if all were made, or if the last run has the reason.
    """
    tests = tuple(_test(wish, runs, test) for test in wish.tests)
    machines: dict[Side, dict[str, str]] = {
        side: next((run.machine for run in runs if run.side == side and run.machine), {}) for side in SIDES
    }
    shape = next((run.shape for run in runs if run.shape), {})
    emulated = machines["guest"].get("hypervisor") == EMULATED
    failure = failure or next((run.problem for run in runs if run.problem), "")
    warnings = (*_of_machines(machines), *_of_shapes(runs), *_of_results(runs, tests))
    return Report(
        wish, tests, shape.get("nodelist", ""), shape.get("ranks", ""), machines, emulated, warnings, failure
    )


def _test(wish: Wish, runs: Sequence[Run], test: Benchmark) -> Result:
    found = {(run.round, run.side): run.outcomes[test.name] for run in runs if test.name in run.outcomes}
    both: list[tuple[dict[str, float], dict[str, float]]] = []
    for number in range(1, wish.rounds + 1):
        pair = [found.get((number, side)) for side in SIDES]
        values = [one.figures.values for one in pair if one is not None and one.figures is not None]
        if len(values) == 2:
            both.append((values[0], values[1]))
    comparisons = tuple(
        compare(metric, [(native[metric.key], guest[metric.key]) for native, guest in rounds])
        for metric in test.metrics
        if (rounds := [pair for pair in both if metric.key in pair[0] and metric.key in pair[1]])
    )
    problems = tuple(dict.fromkeys(_problems(wish, test, found)))
    versions = (_version(found, "native"), _version(found, "guest"))
    if comparisons:
        return Result(test, "measured", comparisons, problems, versions)
    missing = any(one.missing for one in found.values())
    if not problems:
        problems = ("no round has figures of both sides",)
    return Result(test, "missing" if missing else "failed", (), problems, versions)


def _problems(wish: Wish, test: Benchmark, found: dict[tuple[int, Side], Outcome]) -> Iterator[str]:
    for (_, side), one in found.items():
        if one.figures is not None:
            continue
        where = "natively" if side == "native" else f"in guests of {wish.image}"
        yield f"{where}: {one.problem}" + (f"; {_hint(test, side)}" if one.missing else "")


def _hint(test: Benchmark, side: Side) -> str:
    """The packages to install if a test's program is missing."""
    if side == "native":
        return (
            f"install it on the nodes (Debian: {test.packages}), or load the site's module: "
            f"--native-setup 'module load {test.module}'"
        )
    return f"use an image that has it, such as debian-hpc (Debian: {test.packages})"


def _version(found: dict[tuple[int, Side], Outcome], side: Side) -> str:
    figures = (one.figures for (_, where), one in found.items() if where == side)
    return next((one.version for one in figures if one is not None), "")


def _of_machines(machines: dict[Side, dict[str, str]]) -> Iterator[str]:
    native, guest = machines["native"], machines["guest"]
    if not native or not guest:
        return
    if guest.get("hypervisor") == EMULATED:
        yield (
            "the guests are emulated (QEMU without KVM): these figures mean nothing for a site with KVM; "
            "they show only that the tests run"
        )
    elif guest.get("hypervisor") == "none":
        yield "the CPU of the guests names no hypervisor: is the image run in guests at all?"
    if "hypervisor" not in native:
        yield (
            "the nodes cannot tell whether they are virtual machines (aarch64 without /dev/kvm): "
            "if they are, the native figures are not those of hardware"
        )
    elif native["hypervisor"] != "none":
        yield (
            f"the nodes are virtual machines themselves ({native['hypervisor']}): "
            "the native figures are not those of hardware"
        )
    if guest.get("cpus") != native.get("cpus"):
        yield (
            f"guests have {guest.get('cpus')} CPUs, nodes {native.get('cpus')}: vhpc plan --image shows why; "
            "the tests use the CPUs of the allocation"
        )


def _of_shapes(runs: Sequence[Run]) -> Iterator[str]:
    for key, what in (("nodelist", "nodes"), ("ranks", "numbers of MPI ranks")):
        values = sorted({run.shape[key] for run in runs if run.shape.get(key)})
        if len(values) > 1:
            yield f"the jobs ran on different {what} ({', '.join(values)}): their figures cannot be compared"


def _of_results(runs: Sequence[Run], tests: Sequence[Result]) -> Iterator[str]:
    for one in tests:
        native, guest = one.versions
        if native and guest and native != guest:
            yield f"{one.test.name}: not the same program: natively {native}, in guests {guest}"
        answers = [run.outcomes[one.test.name].figures for run in runs if one.test.name in run.outcomes]
        numbers = [
            figures.answer for figures in answers if figures is not None and figures.answer is not None
        ]
        if numbers and max(numbers) - min(numbers) > ANSWER_TOLERANCE * abs(numbers[0]):
            yield f"{one.test.name}: the results differ: {min(numbers):.10g} to {max(numbers):.10g}"


def document(done: Report) -> dict[str, Any]:
    """The report as one JSON document; its keys are described in docs/benchmark.md."""
    return {
        "scope": done.wish.scope,
        "image": done.wish.image,
        "rounds": done.wish.rounds,
        "nodes": done.nodes,
        "ranks": int(done.ranks) if done.ranks.isdecimal() else None,
        "sizes": done.wish.sizes,
        "machines": done.machines,
        "emulated": done.emulated,
        "passed": done.passed,
        "failure": done.failure or None,
        "warnings": list(done.warnings),
        "tests": [_test_document(done, one) for one in done.tests],
        "published": SUMMARY,
        "folder": done.folder or None,
    }


def _test_document(done: Report, one: Result) -> dict[str, Any]:
    return {
        "test": one.test.name,
        "meaning": one.test.meaning,
        "status": one.status,
        "problems": list(one.problems),
        "versions": dict(zip(SIDES, one.versions, strict=True)),
        "metrics": [_metric_document(done, one, comparison) for comparison in one.comparisons],
    }


def _metric_document(done: Report, one: Result, comparison: Comparison) -> dict[str, Any]:
    metric = comparison.metric
    elsewhere = published(one.test.name, metric.key, done.wish.nodes)
    return {
        "metric": metric.key,
        "title": metric.title,
        "unit": metric.unit,
        "higher_is_better": metric.higher_is_better,
        "native": list(comparison.native.values),
        "guest": list(comparison.guest.values),
        "native_median": comparison.native.median,
        "guest_median": comparison.guest.median,
        "efficiency": comparison.efficiency,
        "efficiency_low": comparison.low,
        "efficiency_high": comparison.high,
        "published": None
        if elsewhere is None
        else {"efficiency": elsewhere.efficiency, "source": elsewhere.source},
    }
