# SPDX-License-Identifier: Apache-2.0
"""Runs benchmarks one after the other; none that fails or does not fit stops the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vhpcbench.catalogue import Benchmark
from vhpcbench.machine import Machine
from vhpcbench.targets import described

Status = Literal["met", "missed", "measured", "skipped", "failed"]
POLL_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """The end of one benchmark; ``measured``: it has judged no result, for example in a small lab.

    Attributes:
        reason: of a benchmark that was skipped or failed.
        report: JSON of one that ran.
    """

    benchmark: Benchmark
    status: Status
    reason: str = ""
    seconds: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def judged(self) -> list[dict[str, Any]]:
        """Results with their targets."""
        targets: list[dict[str, Any]] = self.report.get("targets", [])
        return targets

    def document(self) -> dict[str, object]:
        """The same for JSON."""
        return {
            "name": self.benchmark.name,
            "command": self.benchmark.command,
            "status": self.status,
            "reason": self.reason,
            "seconds": round(self.seconds, 1),
            "targets": self.judged or [described(target) for target in self.benchmark.targets],
            "report": self.report or None,
        }


@dataclass(frozen=True)
class Options:
    """Settings of a run.

    Attributes:
        programs: folder of the benchmarks.
        logs: folder for what they print to stderr.
        rounds: of each benchmark; None: its default.
        limit_s: of each benchmark; None: its own.
        wait_s: longest wait for a quiet machine.
        busy: run also on a machine that is not quiet.
        end_s: time that an interrupted benchmark has to end what it has started, before it is killed.
    """

    programs: Path
    logs: Path
    rounds: int | None = None
    limit_s: float | None = None
    wait_s: float = 180.0
    busy: bool = False
    end_s: float = 60.0


def tell(line: str) -> None:
    """Show progress."""
    print(f"bench/all: {line}", file=sys.stderr, flush=True)


def load() -> float:
    """The 1-minute load average."""
    return os.getloadavg()[0]


def run_all(
    benchmarks: Sequence[Benchmark],
    machine: Machine,
    options: Options,
    finished: Callable[[Outcome], None],
) -> None:
    """Run the benchmarks that fit; ``finished`` gets the outcome of each.

    Raises:
        KeyboardInterrupt: the running benchmark has been ended.
    """
    for number, one in enumerate(benchmarks, 1):
        reason = machine.lacks(one.needs) or _wait_until_quiet(one, options)
        if reason:
            outcome = Outcome(one, "skipped", reason)
        else:
            tell(f"{one.name}: {number} of {len(benchmarks)}, load {load():.1f}")
            try:
                outcome = _run(one, options)
            except KeyboardInterrupt:
                finished(Outcome(one, "failed", "interrupted"))
                raise
        said = f": {outcome.reason}" if outcome.reason else f" after {outcome.seconds:.0f} s"
        tell(f"{one.name}: {outcome.status}{said}")
        finished(outcome)


def _wait_until_quiet(one: Benchmark, options: Options) -> str | None:
    """Why the load forbids the benchmark; a benchmark that has just ended is still in the load average."""
    limit = one.needs.load
    if limit is None or options.busy:
        return None
    until = time.monotonic() + options.wait_s
    if load() >= limit:
        tell(f"{one.name}: waits at most {options.wait_s:.0f} s for a load below {limit:g}")
    while (now := load()) >= limit:
        if time.monotonic() >= until:
            return f"needs a load below {limit:g}, it is {now:.1f}: end other work, or use --wait or --busy"
        time.sleep(min(POLL_S, max(until - time.monotonic(), 0)))
    return None


def _run(one: Benchmark, options: Options) -> Outcome:
    argv = [str(options.programs / one.program), "--json", *one.arguments]
    argv += ["--rounds", str(options.rounds)] if options.rounds else []
    environment = dict(os.environ)
    if one.own_lab:
        environment.pop("VLAB_STATE", None)
    log, out = (options.logs / f"{one.name}.{kind}" for kind in ("log", "out"))
    limit = options.limit_s or one.limit_s
    began = time.monotonic()
    try:
        status = _ended(argv, environment, out, log, limit, options.end_s)
        text = out.read_text(encoding="utf-8", errors="replace")
    except subprocess.TimeoutExpired:
        return Outcome(one, "failed", f"ended after its limit of {limit:g} s", time.monotonic() - began)
    except OSError as err:
        return Outcome(one, "failed", f"{argv[0]}: {err.strerror}")
    finally:
        out.unlink(missing_ok=True)
    seconds = time.monotonic() - began
    if status:
        return Outcome(one, "failed", _reason(status, log), seconds)
    return _measured(one, text, seconds)


def _ended(
    argv: list[str], environment: dict[str, str], out: Path, log: Path, limit_s: float, end_s: float
) -> int:
    """Exit status of a program.

    Raises:
        TimeoutExpired: it has been ended after its limit.
    """
    with out.open("wb") as output, log.open("wb") as errors:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,  # a file: a daemon that it leaves behind would keep a pipe open
            stderr=errors,
            env=environment,
            start_new_session=True,  # so that its processes get a signal together
        )
    try:
        return process.wait(limit_s)
    finally:
        if process.returncode is None:
            _end(process, end_s)


def _measured(one: Benchmark, out: str, seconds: float) -> Outcome:
    try:
        report = json.loads(out)
        judged = report["targets"]
    except (ValueError, KeyError, TypeError):
        return Outcome(one, "failed", f"it printed no JSON report: {out[:80]!r}", seconds)
    if not judged:
        return Outcome(one, "measured", "", seconds, report)
    return Outcome(one, "met" if report["met"] else "missed", "", seconds, report)


def _reason(status: int, log: Path) -> str:
    """The last line of the program's errors, or its exit status."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    ended = f"signal {-status}" if status < 0 else f"exit status {status}"
    return lines[-1].strip() if lines else ended


def _end(process: subprocess.Popen[bytes], end_s: float) -> None:
    """End a program with its children: Python cleans up on SIGINT."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(end_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
