# SPDX-License-Identifier: Apache-2.0
"""vhpc bench compares: direction and spread of efficiencies, warnings, what has not run, the picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vhpc_slurm.bench.catalogue import BY_NAME, TESTS, Benchmark, Metric
from vhpc_slurm.bench.compare import compare, figure, part, ratio
from vhpc_slurm.bench.jobfolder import Outcome, Side
from vhpc_slurm.bench.outputs import Figures, pairs
from vhpc_slurm.bench.plot import draw
from vhpc_slurm.bench.published import published
from vhpc_slurm.bench.report import Report, document, report
from vhpc_slurm.bench.run import Run
from vhpc_slurm.bench.wish import Wish, choose, sizes
from vhpc_slurm.errors import UserError

RATE, TIME = Metric("r", "r", "1/s"), Metric("t", "t", "us", higher_is_better=False)
POSITIVE = st.floats(1e-6, 1e9)
MACHINE = pairs((Path(__file__).parents[2] / "data/bench/machine.out").read_text())


def test_efficiency_is_native_speed_at_one_and_lower_is_worse() -> None:
    assert compare(RATE, [(200.0, 100.0)]).efficiency == 0.5  # half the rate
    assert compare(TIME, [(2.0, 4.0)]).efficiency == 0.5  # twice the time
    assert compare(RATE, [(100.0, 100.0)]).efficiency == compare(TIME, [(3.0, 3.0)]).efficiency == 1.0


def test_medians_and_the_spread_of_rounds() -> None:
    found = compare(RATE, [(100.0, 90.0), (200.0, 100.0), (110.0, 110.0)])
    assert (found.native.median, found.native.low, found.native.high) == (110.0, 100.0, 200.0)
    assert (found.guest.median, found.guest.low, found.guest.high) == (100.0, 90.0, 110.0)
    assert found.efficiency == pytest.approx(100 / 110)
    assert (found.low, found.high) == (0.5, 1.0)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=9))
def test_times_are_inverted_rates(rounds: list[tuple[float, float]]) -> None:
    for native, guest in rounds:
        assert ratio(TIME, native, guest) == pytest.approx(ratio(RATE, 1 / native, 1 / guest))
    found = compare(RATE, rounds)
    assert found.low <= found.high
    assert found.native.low <= found.native.median <= found.native.high


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (42150.3, "42150"),
        (72.9, "72.9"),
        (0.985, "0.985"),
        (0.0017, "0.00170"),
        (1.0, "1.00"),
        (2e-7, "2e-07"),
    ],
)
def test_figures_have_no_exponent_unless_tiny(value: float, text: str) -> None:
    assert figure(value) == text


def test_efficiencies_have_two_decimals_unless_low() -> None:
    assert [part(value) for value in (1.0, 0.978, 0.1, 0.0794, 0.00032)] == [
        "1.00",
        "0.98",
        "0.10",
        "0.0794",
        "0.000320",
    ]


# --- reports ------------------------------------------------------------------


def wish(*names: str, nodes: int = 1, rounds: int = 2, named: bool = False) -> Wish:
    chosen = tuple(BY_NAME[name] for name in names)
    return Wish("node" if nodes == 1 else "job", "debian-hpc", nodes, chosen, named, rounds, sizes(()))


def good(test: Benchmark, value: float, version: str = "1", answer: float | None = None) -> Outcome:
    return Outcome(Figures(dict.fromkeys((metric.key for metric in test.metrics), value), version, answer))


def run(number: int, side: Side, outcomes: dict[str, Outcome], **machine: str) -> Run:
    hypervisor = {"hypervisor": "none" if side == "native" else "KVMKVMKVM"}
    shape = {"nodelist": "n1", "ranks": "2"}
    return Run(number, side, 100 + number, outcomes, MACHINE | hypervisor | machine, shape)


def runs(test: str, native: float, guest: float) -> list[Run]:
    one = BY_NAME[test]
    return [
        run(number, side, {test: good(one, native if side == "native" else guest)})
        for number in (1, 2)
        for side in ("native", "guest")
    ]


def test_a_run_with_kvm_passes_without_warnings() -> None:
    done = report(wish("triad"), runs("triad", 100, 97))
    assert (done.passed, done.warnings, done.emulated) == (True, (), False)
    (one,) = done.tests
    assert (one.status, one.comparisons[0].efficiency) == ("measured", 0.97)


def test_emulated_guests_and_virtual_nodes_are_warnings() -> None:
    found = runs("triad", 100, 1)
    for one in found:
        one.machine["hypervisor"] = "TCGTCGTCGTCG" if one.side == "guest" else MACHINE["hypervisor"]
    done = report(wish("triad"), found)
    assert done.emulated
    assert ["emulated (QEMU without KVM)" in text for text in done.warnings] == [True, False]
    assert "virtual machines themselves (KVMKVMKVM)" in done.warnings[1]
    assert "EMULATED GUESTS" in draw(done)


def test_nodes_that_name_no_hypervisor_are_a_warning() -> None:
    found = runs("triad", 100, 97)
    for one in found:
        del one.machine["hypervisor"]
    done = report(wish("triad"), found)
    assert len(done.warnings) == 1
    assert done.warnings[0].startswith("the nodes cannot tell whether they are virtual machines (aarch64")


@pytest.mark.parametrize(("side", "says"), [("native", "natively"), ("guest", "in guests of debian-hpc")])
def test_a_missing_program_is_reported_with_its_package(side: Side, says: str) -> None:
    found = runs("lammps", 10, 9)
    for one in found:
        if one.side == side:
            one.outcomes["lammps"] = Outcome(None, "lmp is not installed, or not in PATH", missing=True)
    done = report(wish("lammps"), found)
    (one_test,) = done.tests
    assert one_test.status == "missing"
    (problem,) = one_test.problems
    assert problem.startswith(f"{says}: lmp is not installed")
    assert "Debian: lammps" in problem
    assert done.passed  # the user did not ask for it
    assert not report(wish("lammps", named=True), found).passed


def test_a_failed_round_is_reported_and_the_others_count() -> None:
    found = runs("triad", 100, 90)
    found[3].outcomes["triad"] = Outcome(None, "exit status 1")
    done = report(wish("triad"), found)
    (one,) = done.tests
    assert (one.status, one.comparisons[0].native.values) == ("measured", (100,))
    assert one.problems == ("in guests of debian-hpc: exit status 1",)
    assert not done.passed


def test_a_job_that_failed_leaves_the_rounds_before_it() -> None:
    found = runs("triad", 100, 90)[:3]
    found[2].problem = "native job 102 ended as TIMEOUT"
    done = report(wish("triad"), found)
    assert (done.failure, done.passed) == ("native job 102 ended as TIMEOUT", False)
    assert done.tests[0].comparisons[0].guest.values == (90,)


def test_different_programs_results_nodes_or_cpus_are_warnings() -> None:
    one = BY_NAME["lammps"]
    native = run(1, "native", {"lammps": good(one, 9, "LAMMPS 4 Feb 2025", -4.6)}, cpus="4")
    guest = run(1, "guest", {"lammps": good(one, 9, "LAMMPS 29 Aug 2024", -4.7)}, cpus="3")
    guest.shape["nodelist"] = "n2"
    warnings = report(wish("lammps", rounds=1), [native, guest]).warnings
    for text in (
        "guests have 3 CPUs, nodes 4",
        "different nodes (n1, n2)",
        "not the same program",
        "results differ",
    ):
        assert any(text in warning for warning in warnings), text
    assert len(warnings) == 4


def test_the_document_has_all_figures() -> None:
    done = report(wish("pingpong", nodes=2), runs("pingpong", 2, 4))
    again = json.loads(json.dumps(document(done)))
    latency, bandwidth = again["tests"][0]["metrics"]
    assert (latency["native"], latency["guest"], latency["efficiency"]) == ([2, 2], [4, 4], 0.5)
    assert (bandwidth["efficiency"], bandwidth["unit"]) == (2.0, "MB/s")
    assert bandwidth["published"]["efficiency"] == 0.97
    assert (again["passed"], again["failure"], again["ranks"]) == (True, None, 2)


def _picture(done: Report) -> tuple[list[ET.Element], str]:
    root = ET.fromstring(draw(done))
    space = "{http://www.w3.org/2000/svg}"
    return list(root.iter(f"{space}rect"))[1:], " ".join(
        node.text or "" for node in root.iter(f"{space}text")
    )


def test_the_picture_has_a_bar_for_each_metric() -> None:
    done = report(wish("files", "triad"), runs("files", 100, 50))
    done = replace(done, tests=(*done.tests, *report(wish("lammps"), []).tests))
    bars, words = _picture(done)
    assert len(bars) == 6
    assert len({bar.get("width") for bar in bars}) == 1
    assert "0.50" in words
    assert "lammps: failed" in words
    assert draw(done) == draw(done)


def test_huge_ratios_and_markup_stay_in_the_picture() -> None:
    done = report(replace(wish("triad"), image="<b>&"), runs("triad", 1, 1000))
    (bar,), words = _picture(done)
    assert float(bar.get("width", "0")) <= 420
    assert "<b>&" in words


def test_long_names_and_reasons_end_within_the_picture() -> None:
    done = report(replace(wish("triad", "lammps"), image="i" * 200), runs("triad", 100, 97))
    failed = replace(done.tests[1], problems=("p" * 200,))
    _, words = _picture(replace(done, tests=(done.tests[0], failed)))
    assert 50 < words.count("i") < 100
    assert 100 < words.count("p") < 145
    assert words.count("…") == 2


# --- what is asked for ----------------------------------------------------------


def test_tests_and_sizes_are_checked_before_anything_runs() -> None:
    assert [test.name for test in choose("node", None)] == ["triad", "files", "lammps", "hpcc"]
    assert [test.name for test in choose("job", "lammps,pingpong")] == ["pingpong", "lammps"]
    assert sizes(["lj-side=7"])["lj-side"] == 7
    for text, says in (
        ("traid", "did you mean triad"),
        ("pingpong", "vhpc bench job"),
        (",", "names no test"),
    ):
        with pytest.raises(UserError, match=says):
            choose("node", text)
    for text in ("side=1", "lj-side", "lj-side=0", "lj-side=x", "lj-side=9999999999999", "lj-side=²"):
        with pytest.raises(UserError):
            sizes([text])


def test_published_figures_name_metrics_that_exist() -> None:
    known = {(test.name, metric.key) for test in TESTS for metric in test.metrics}
    found = {pair for pair in known if published(*pair, 1) is not None}
    assert len(found) == 8
    hpl = [published("hpcc", "HPL_Tflops", nodes) for nodes in (1, 2, 128, 4096)]
    assert [one.efficiency for one in hpl if one is not None] == [0.99, 0.98, 0.94, 0.94]
