# SPDX-License-Identifier: Apache-2.0
"""Parsing what the programs print.  Pure.

Sources: LAMMPS manual, "Screen and logfile output"; HPC Challenge, summary
section of hpccoutf.txt; measure/ for vhpc's own programs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from vhpc_slurm.bench.catalogue import Benchmark
from vhpc_slurm.terminal import one_line

_LOOP = re.compile(r"^Loop time of (\S+) on (\d+) procs for (\d+) steps with \d+ atoms", re.MULTILINE)
_LAMMPS_VERSION = re.compile(r"^LAMMPS \((.{1,80}?)\)", re.MULTILINE)
_SUMMARY = re.compile(
    r"^Begin of Summary section\.\n(.*?)^End of Summary section\.", re.MULTILINE | re.DOTALL
)
_EXITED = re.compile(
    r"^(?:srun|slurmstepd): (?:error: )?.*(?:[Ee]xited with|task \d+: |Terminating|launch failed)"
)
MISSING = (3, 127)
"""Exit statuses of a test whose program or library is not installed."""


class OutputError(ValueError):
    """The output is not that of a run that succeeded."""


@dataclass(frozen=True)
class Figures:
    """The result of one run of a test.

    Attributes:
        values: figure of each metric that was measured, by its key, in the metric's unit.
        version: the program and its version, as it names itself.
        answer: a result that does not depend on speed and must be the same on both sides; None if the program
            prints no such result.
    """

    values: dict[str, float]
    version: str = ""
    answer: float | None = None


def parse(test: Benchmark, text: str, ranks: int) -> Figures:
    """The figures in the output of one test.

    Args:
        test: the test.
        text: its standard output.
        ranks: number of MPI ranks that the test was started with.

    Raises:
        OutputError: the program did not run to its end, or not with these ranks.
    """
    match test.name:
        case "lammps":
            return _lammps(test, text, ranks)
        case "hpcc":
            return _hpcc(test, text, ranks)
    return _own(test, text)  # vhpc's own programs check the number of ranks themselves


def pairs(text: str) -> dict[str, str]:
    """Lines of a name and a value; a line without a value is ignored."""
    rows = (line.partition(" ") for line in text.splitlines())
    return {name: value.strip() for name, space, value in rows if space and value.strip()}


def reason(stderr: str) -> str:
    """The most informative line of a failed test's stderr; empty if stderr is empty."""
    lines = [one_line(line) for line in stderr.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(("vhpc", "slurmstepd: error: vhpc"))]
    missing = [line for line in lines if "is not installed" in line]
    others = [line for line in lines if not _EXITED.match(line)]
    return (ours or missing or others[-1:] or lines or [""])[0][:300]


def _own(test: Benchmark, text: str) -> Figures:
    found = pairs(text)
    values = {}
    for metric in test.metrics:
        number = _number(found.get(metric.key, ""))
        if number is None:
            raise OutputError(f"the output has no {metric.key}")
        values[metric.key] = number * metric.factor
    return Figures(values, found.get("library", ""))


def _lammps(test: Benchmark, text: str, ranks: int) -> Figures:
    loops = _LOOP.findall(text)
    if not loops:
        raise OutputError("LAMMPS printed no loop time")
    seconds, procs, steps = _number(loops[0][0]), int(loops[0][1]), int(loops[0][2])
    if procs != ranks or len(loops) > 1:
        raise OutputError(
            f"LAMMPS ran {len(loops)} times on {procs} ranks instead of once on {ranks}: "
            "its MPI library does not understand srun's --mpi"
        )
    if seconds is None:
        raise OutputError(f"LAMMPS printed the loop time {loops[0][0][:40]!r}")
    version = _LAMMPS_VERSION.search(text)
    return Figures(
        {test.metrics[0].key: steps / seconds},
        f"LAMMPS {version[1]}" if version else "",
        _total_energy(text, steps),
    )


def _total_energy(text: str, last_step: int) -> float:
    """TotEng of the last step, from the table of thermodynamic output."""
    head: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["Step"]:
            head = words
        elif head and len(words) == len(head) and words[0] == str(last_step):
            try:
                energy = float(words[head.index("TotEng")])
            except ValueError as err:
                raise OutputError("LAMMPS printed no total energy") from err
            if not math.isfinite(energy):
                raise OutputError(f"the total energy of LAMMPS is {energy}")
            return energy
    raise OutputError(f"LAMMPS printed no results of step {last_step}")


def _hpcc(test: Benchmark, text: str, ranks: int) -> Figures:
    section = _SUMMARY.search(text)
    if section is None:
        raise OutputError("HPCC did not write its summary")
    rows = (line.partition("=") for line in section[1].splitlines())
    found = {name: value for name, _, value in rows}
    if found.get("Success") != "1":
        raise OutputError("HPCC reports that one of its tests failed (Success is not 1)")
    if found.get("CommWorldProcs") != str(ranks):
        raise OutputError(
            f"HPCC ran on {found.get('CommWorldProcs', '?')} ranks instead of {ranks}: "
            "its MPI library does not understand srun's --mpi"
        )
    numbers = {metric.key: _number(found.get(metric.key, "")) for metric in test.metrics}
    values = {
        metric.key: number * metric.factor
        for metric in test.metrics
        if (number := numbers[metric.key]) is not None
    }
    if "HPL_Tflops" not in values:
        raise OutputError("HPCC has no result of HPL")
    version = ".".join(found.get(f"Version{part}", "?") for part in ("Major", "Minor", "Micro"))
    return Figures(values, f"HPCC {version}")


def _number(text: str) -> float | None:
    """A positive finite number; programs print 0 or -1 for what they did not measure."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
