# SPDX-License-Identifier: Apache-2.0
"""bench/all: targets, needs of benchmarks, runs of small programs, the picture, README's table."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pace import limit
from vhpcbench import runner, suite
from vhpcbench.catalogue import Benchmark, Needs, known
from vhpcbench.common import Report
from vhpcbench.machine import LabState, Machine
from vhpcbench.targets import Target, at_least, at_most, under

BENCH = Path(__file__).resolve().parents[3] / "bench"
SMALL = Machine(root=False, cpus=2, available_mib=1000, lab=None)
ABOUT = {"cpu": "C", "cpus": 2, "memory_mib": 2048, "guests": "emulated", "commit": None, "dirty": False}
IMAGE = frozenset({"debian-minimal"})


@pytest.mark.parametrize(
    ("target", "value", "met", "part"),
    [
        (at_most(1.1, "x"), 1.1, True, 1.0),
        (at_most(1.1, "x"), 2.2, False, 2.0),
        (under(30, "x", "ms"), 30, False, 1.0),
        (under(30, "x", "ms"), -3, True, -0.1),
        (at_least(0.8, "x"), 0.8, True, 1.0),
        (at_least(0.8, "x"), 0.4, False, 2.0),
        (at_least(0.8, "x"), 0, False, None),
        (at_most(0, "x", "sweeps"), 0, True, 0.0),
        (at_most(0, "x", "sweeps"), 1, False, None),
    ],
)
def test_results_are_compared_with_their_targets(
    target: Target, value: float, met: bool, part: float | None
) -> None:
    assert target.met(value) is met
    found = target.part(value)
    assert found == (part if part is None else pytest.approx(part))


def test_a_target_is_written_as_in_the_documents() -> None:
    texts = [at_most(1.1, "x").text, under(30, "x", "ms").text, at_least(500, "x", "a second").text]
    assert texts == ["at most 1.1", "under 30 ms", "at least 500 a second"]


def test_a_report_has_its_targets_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("x")
    assert not report.met  # nothing was compared
    report.judge(at_most(2, "a"), 1)
    report.show(as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["met"], shown["targets"][0]["value"], shown["targets"][0]["limit"]) == (True, 1, 2)
    report.judge(under(2, "b", "s"), 2)
    assert not report.met
    report.show(as_json=False)
    assert "b: 2 s, target under 2 s: MISSED" in capsys.readouterr().out


# --- needs --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "lab", "says"),
    [
        (Needs(root=True), None, "run bench/all as root"),
        (Needs(cpus=16), None, "needs 16 CPUs, the machine has 2"),
        (Needs(memory_mib=2000), None, "needs 2000 MiB of memory, 1000 are available"),
        (Needs(programs=("sh", "no-such-program")), None, "needs no-such-program: `make deps`"),
        (Needs(modules=("json", "no_such_module")), None, "needs no_such_module: `make deps`"),
        (Needs(lab_nodes=2), None, "run `make lab-up`"),
        (Needs(lab_nodes=8), None, "run `lab/vlab up --nodes 8`"),
        (Needs(lab_nodes=8), LabState(2, IMAGE), "needs 8 nodes, the lab has 2"),
        (Needs(lab_nodes=2), LabState(0, IMAGE), "no guests"),
        (Needs(lab_nodes=2), LabState(2, IMAGE, whole=False), "`lab/vlab status`"),
        (Needs(lab_nodes=2), LabState(2, frozenset({"other"})), "run `scripts/publish-image`"),
        (Needs(lab_nodes=2, image="other"), LabState(2, IMAGE), "run `scripts/publish-image other`"),
        (Needs(lab_nodes=2, programs=("sh",)), LabState(2, IMAGE), None),
        (Needs(), None, None),
    ],
)
def test_a_need_that_is_not_met_says_what_to_do(needs: Needs, lab: LabState | None, says: str | None) -> None:
    reason = Machine(SMALL.root, SMALL.cpus, SMALL.available_mib, lab).lacks(needs)
    assert reason is None if says is None else says in (reason or "")


# --- runs ---------------------------------------------------------------------


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """SIGINT ends programs that are started: a shell's background jobs and their children ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def report(*values: float) -> str:
    """A program that prints a report with these values, each with the target 2."""
    made = Report("x")
    for value in values:
        made.judge(at_most(2, "result <&>"), value)
    body = {"targets": [one.document() for one in made.judged], "met": made.met}
    return f"echo '{json.dumps(body)}'"


def program(folder: Path, name: str, script: str, needs: Needs | None = None) -> Benchmark:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return Benchmark(name, needs or Needs(), limit(20), name, ("--own",), targets=(at_most(2, "x"),))


def options(folder: Path, **changes: Any) -> runner.Options:
    return replace(runner.Options(folder, folder, wait_s=0.0, end_s=limit(5)), **changes)


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads((folder / "all.json").read_text())["results"]}


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [
        program(tmp_path, "broken", "echo first >&2; echo 'no such thing' >&2; exit 3"),
        program(tmp_path, "silent", "exit 4"),
        program(tmp_path, "killed", "kill -9 $$"),
        program(tmp_path, "chatty", "echo not JSON"),
        program(tmp_path, "list", "echo '[]'"),
        Benchmark("absent", Needs(), 5, "absent"),
        program(tmp_path, "large", report(1), Needs(cpus=1000)),
        program(tmp_path, "late", report(1, 3)),
        program(tmp_path, "good", report(1)),
        program(tmp_path, "small-lab", report()),
    ]
    assert suite.measure(chosen, SMALL, ABOUT, options(tmp_path)) == 1
    found = results(tmp_path)
    assert {name: one["status"] for name, one in found.items()} == {
        **dict.fromkeys(("broken", "silent", "killed", "chatty", "list", "absent"), "failed"),
        "large": "skipped",
        "late": "missed",
        "good": "met",
        "small-lab": "measured",
    }
    reasons = [found[name]["reason"] for name in ("broken", "silent", "killed")]
    assert reasons == ["no such thing", "exit status 4", "signal 9"]
    assert "No such file" in found["absent"]["reason"]
    assert found["large"]["targets"][0]["target"] == "at most 2"
    out, progress = capsys.readouterr()
    lines = [line.split("  ") for line in out.splitlines()]
    assert [line[0] for line in lines].count("late") == 2
    assert any(line[0] == "large" and line[-1].startswith("skipped: needs 1000 CPUs") for line in lines)
    assert "good: met" in progress
    about = json.loads((tmp_path / "all.json").read_text())["machine"]
    assert about.keys() == ABOUT.keys() | {"date", "load_before", "load_after"}


def test_missed_targets_fail_only_with_strict(tmp_path: Path) -> None:
    chosen = [program(tmp_path, "late", report(3)), program(tmp_path, "large", "", Needs(cpus=1000))]
    assert suite.measure(chosen, SMALL, ABOUT, options(tmp_path)) == 0
    assert suite.measure(chosen, SMALL, ABOUT, options(tmp_path), strict=True) == 1
    assert suite.measure(chosen[1:], SMALL, ABOUT, options(tmp_path), strict=True) == 0


def test_rounds_follow_the_own_arguments(tmp_path: Path) -> None:
    one = program(tmp_path, "args", f'echo "$@" >{tmp_path}/said; {report(1)}')
    suite.measure([one], SMALL, ABOUT, options(tmp_path, rounds=7))
    assert (tmp_path / "said").read_text() == "--json --own --rounds 7\n"


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("trap", ["echo cleaned >{}; exit 0", ""])
def test_after_its_limit_a_program_is_ended(tmp_path: Path, trap: str) -> None:
    cleaned = tmp_path / "cleaned"
    # the loop outlives its sleep, which gets the signal as well
    slow = program(tmp_path, "slow", f"trap '{trap.format(cleaned)}' INT; while :; do sleep 0.05; done")
    settings = options(tmp_path, limit_s=limit(0.4), end_s=limit(5) if trap else 0.1)
    assert suite.measure([slow], SMALL, ABOUT, settings) == 1
    assert results(tmp_path)["slow"]["reason"].startswith("ended after its limit of ")
    assert cleaned.exists() == bool(trap)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupted_run_leaves_its_results(tmp_path: Path) -> None:
    interrupt = program(tmp_path, "interrupt", f"kill -INT {os.getpid()}; sleep 60")
    chosen = [program(tmp_path, "good", report(1)), interrupt, program(tmp_path, "never", report(1))]
    assert suite.measure(chosen, SMALL, ABOUT, options(tmp_path)) == 1
    found = results(tmp_path)
    assert {name: one["status"] for name, one in found.items()} == {"good": "met", "interrupt": "failed"}
    assert found["interrupt"]["reason"] == "interrupted"


def test_a_busy_machine_is_a_reason_unless_allowed(tmp_path: Path) -> None:
    # no load average is below 0
    one = program(tmp_path, "quiet", report(1), Needs(load=0.0))
    suite.measure([one], SMALL, ABOUT, options(tmp_path))
    assert results(tmp_path)["quiet"]["reason"].startswith("needs a load below 0")
    suite.measure([one], SMALL, ABOUT, options(tmp_path, busy=True))
    assert results(tmp_path)["quiet"]["status"] == "met"


def test_a_bar_ends_at_the_line_when_the_limit_is_reached(tmp_path: Path) -> None:
    chosen = [program(tmp_path, "bars", report(1, 2, 2.5, 100)), program(tmp_path, "bad", "exit 1")]
    suite.measure(chosen, SMALL, ABOUT, options(tmp_path))
    root = ElementTree.parse(tmp_path / "all.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    bars = [bar for bar in root.iter(f"{space}rect") if bar.get("class") != "ground"]
    (line,) = [line for line in root.iter(f"{space}line") if line.get("class") == "limit"]
    ends = [float(bar.get("x", "")) + float(bar.get("width", "")) for bar in bars]
    at = float(line.get("x1", ""))
    assert [bar.get("class") for bar in bars] == ["met", "met", "missed", "missed"]
    assert ends[0] < at == ends[1] < ends[2] < ends[3] < float(root.get("width", ""))
    words = " ".join(text.text or "" for text in root.iter(f"{space}text"))
    assert "result <&>" in words
    assert "bad: failed: exit status 1" in words


# --- command line and documents -------------------------------------------------


@pytest.mark.parametrize(
    "argv", [["--only", "plan,nothing"], ["--rounds", "0"], ["--limit", "0"], ["--wait", "nan"], ["plan"]]
)
def test_wrong_usage_has_its_own_exit_status(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        suite.run(argv)
    assert ended.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_every_program_is_known_to_bench_all() -> None:
    programs = {path.name for path in BENCH.iterdir() if path.is_file() and os.access(path, os.X_OK)}
    assert {one.program for one in known()} == programs - {"all"}


def test_the_readme_has_the_targets_of_the_code() -> None:
    row = re.compile(r"^\| \[`(bench/[^`]+)`\]\([^)]+\) \| [^|]+ \| ([^|]+) \| ", re.MULTILINE)
    written: dict[str, set[str]] = {}
    for command, target in row.findall((BENCH / "README.md").read_text()):
        written.setdefault(command, set()).add(target)
    listed = [suite.listed(one, SMALL) for one in known()]
    targets = {str(one["command"]): one["targets"] for one in listed}
    assert written == {
        command: {target["target"] for target in found}
        for command, found in targets.items()
        if isinstance(found, list)
    }
