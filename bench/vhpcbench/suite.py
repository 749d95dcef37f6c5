# SPDX-License-Identifier: Apache-2.0
"""Run all benchmarks that fit this machine, one after the other.

A benchmark that does not fit is skipped, with the reason. Some need a quiet machine: after another benchmark
they wait until the load average has fallen. Progress goes to stderr, and a table of all results to stdout.
The output folder gets all.json with the machine and all results, all.svg with a bar for each result, and
NAME.log with the errors of each benchmark. Without --out it is build/bench/DATE-TIME.

Exit status 0: no benchmark failed; 1: one failed, or with --strict missed a target; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vhpcbench import machine as machines
from vhpcbench.catalogue import MINUTE_S, Benchmark, known
from vhpcbench.common import CHECKOUT
from vhpcbench.plot import draw, figure
from vhpcbench.runner import Options, Outcome, load, run_all, tell
from vhpcbench.targets import described

HEADER = ("benchmark", "result", "value", "target", "verdict")


def run(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    benchmarks = known()
    args = _arguments(benchmarks, argv)
    chosen = [one for one in benchmarks if args.only is None or one.name in args.only]
    machine = machines.found()
    if args.list:
        _list(chosen, machine, as_json=args.json)
        return 0
    out = args.out or CHECKOUT / "build/bench" / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        print(f"bench/all: --out: {out}: {err.strerror}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    limit_s = args.limit and args.limit * MINUTE_S
    options = Options(CHECKOUT / "bench", out, args.rounds, limit_s, args.wait, args.busy)
    return measure(chosen, machine, machines.describe(), options, strict=args.strict, as_json=args.json)


def measure(
    chosen: Sequence[Benchmark],
    machine: machines.Machine,
    description: dict[str, object],
    options: Options,
    *,
    strict: bool = False,
    as_json: bool = False,
) -> int:
    """Run the benchmarks and write the results after each; returns the exit status."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"date": now, **description, "load_before": load(), "load_after": load()}
    outcomes: list[Outcome] = []

    def finished(outcome: Outcome) -> None:
        outcomes.append(outcome)
        about["load_after"] = load()
        _write(options.logs, about, outcomes)

    interrupted = False
    try:
        run_all(chosen, machine, options, finished)
    except KeyboardInterrupt:
        interrupted = True
        tell("interrupted: the results until now are written")
    if as_json:
        print(json.dumps(_document(about, outcomes), indent=2))
    else:
        print("\n".join(table(outcomes)))
    tell(f"results: {options.logs}/all.json and all.svg")
    bad = {"failed", "missed"} if strict else {"failed"}
    return int(interrupted or any(one.status in bad for one in outcomes))


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One line for each result, and for each benchmark without one."""
    rows = [HEADER, *(row for outcome in outcomes for row in _rows(outcome))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join((*cells, row[-1])).rstrip()


def _rows(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    name, targets = outcome.benchmark.name, outcome.benchmark.targets
    if not outcome.judged:
        target = targets[0].text if len(targets) == 1 else f"{len(targets)} targets"
        yield name, "", "", target, outcome.status + (f": {outcome.reason}" if outcome.reason else "")
    for one in outcome.judged:
        yield name, one["name"], figure(one), one["target"], "met" if one["met"] else "MISSED"


def _document(about: dict[str, Any], outcomes: Sequence[Outcome]) -> dict[str, object]:
    return {"machine": about, "results": [one.document() for one in outcomes]}


def _write(folder: Path, about: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write all.json and all.svg; an interrupted run leaves whole files."""
    files = {"all.json": json.dumps(_document(about, outcomes), indent=2) + "\n"}
    files["all.svg"] = draw(about, outcomes) + "\n"
    for name, text in files.items():
        new = folder / f".{name}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(folder / name)


def _list(chosen: Sequence[Benchmark], machine: machines.Machine, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([listed(one, machine) for one in chosen], indent=2))
        return
    width = max(len(one.name) for one in chosen)
    for one in chosen:
        fits = machine.lacks(one.needs) or "fits"
        print(
            f"{one.name:<{width}}  {fits}  (needs {one.needs.text}; at most {one.limit_s / 60:.0f} minutes)"
        )


def listed(one: Benchmark, machine: machines.Machine) -> dict[str, object]:
    """A benchmark for ``--list --json``; ``skip``: the reason if it does not fit, apart from the load."""
    return {
        "name": one.name,
        "command": one.command,
        "needs": one.needs.text,
        "limit_s": one.limit_s,
        "targets": [described(target) for target in one.targets],
        "skip": machine.lacks(one.needs),
    }


def _arguments(benchmarks: Sequence[Benchmark], argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "bench/all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--list", action="store_true", help="list the benchmarks and whether they fit, and run nothing")
    add("--json", action="store_true", help="print JSON in place of a table")
    add("--only", type=_names, metavar="NAME,…", help="only these; --list shows the names")
    add("--rounds", type=_positive, metavar="N", help="rounds of each (default: its own)")
    add("--out", type=Path, metavar="FOLDER", help="folder for the results")
    add("--limit", type=_minutes, metavar="MINUTES", help="end each after so long (default: its own limit)")
    add("--wait", type=_seconds, default=300.0, metavar="SECONDS", help="for a quiet machine (default 300)")
    add("--busy", action="store_true", help="run also those that need a quiet machine; all.json has the load")
    add("--strict", action="store_true", help="exit status 1 also if a target is missed")
    args = parser.parse_args(argv)
    names = [one.name for one in benchmarks]
    if unknown := sorted(set(args.only or ()) - set(names)):
        parser.error(f"--only: no benchmark {', '.join(unknown)}; there are {', '.join(names)}")
    return args


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _seconds(text: str) -> float:
    if not 0 <= (number := float(text)) < float("inf"):
        raise ValueError
    return number


def _minutes(text: str) -> float:
    if (number := _seconds(text)) == 0:
        raise ValueError
    return number


if __name__ == "__main__":
    raise SystemExit(run())
