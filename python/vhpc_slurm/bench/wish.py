# SPDX-License-Identifier: Apache-2.0
"""The caller's request, checked before a job is submitted.  Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from vhpc_slurm.bench.catalogue import BY_NAME, Benchmark, Scope, of
from vhpc_slurm.errors import UserError

# name: (default, lowest, highest, meaning)
SIZES: dict[str, tuple[int, int, int, str]] = {
    "triad-mib": (64, 1, 1 << 20, "MiB of each of triad's three arrays, per CPU; at least 4 times the cache"),
    "triad-rounds": (20, 1, 1000, "repetitions, of which the fastest counts"),
    "files-mib": (256, 1, 1 << 20, "MiB of the large file"),
    "files-count": (1000, 1, 1000000, "number of small files"),
    "mpi-count": (
        10000,
        1,
        100000000,
        "messages of 8 bytes, and allreduces; large messages are 20 times fewer",
    ),
    "lj-side": (40, 4, 2000, "edge of the Lennard-Jones box, in unit cells of 4 atoms"),
    "lj-steps": (1000, 1, 10000000, "time steps"),
    "hpcc-mib": (128, 1, 1 << 20, "MiB of HPL's matrix per rank"),
}


@dataclass(frozen=True)
class Wish:
    """One call of ``vhpc bench``.

    Attributes:
        scope: which command.
        image: the guests' image, ``NAME[:TAG]``.
        nodes: number of nodes of each job.
        tests: what to run, in the order of the catalogue.
        named: whether the caller named the tests; then a test that cannot run is an error.
        rounds: number of rounds; each is one native job and one job with guests.
        sizes: value of each of SIZES.
        mpi: value of srun's ``--mpi``.
        tasks: MPI ranks per node; None: one for each CPU of the allocation.
        minutes: time limit of each job.
        queue_s: how long a job may wait in the queue, in seconds.
        sbatch: further options of all jobs.
        guest_sbatch: further options of the jobs with guests.
        native_setup: shell command that runs first in native jobs.
        guest_setup: the same in guests.
    """

    scope: Scope
    image: str
    nodes: int
    tests: tuple[Benchmark, ...]
    named: bool
    rounds: int
    sizes: dict[str, int]
    mpi: str = "pmix"
    tasks: int | None = None
    minutes: int = 60
    queue_s: int = 3600
    sbatch: tuple[str, ...] = ()
    guest_sbatch: tuple[str, ...] = ()
    native_setup: str = ""
    guest_setup: str = ""


def choose(scope: Scope, text: str | None) -> tuple[Benchmark, ...]:
    """The tests that ``--tests`` names; without it, all tests of the command.

    Raises:
        UserError: a name is unknown or belongs to the other command.
    """
    if text is None:
        return of(scope)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in BY_NAME:
            near = difflib.get_close_matches(name, list(BY_NAME), 1)
            hint = (
                f"did you mean {near[0]}?" if near else "tests: " + ", ".join(test.name for test in of(scope))
            )
            raise UserError(f"there is no test {name[:40]!r}", "", hint)
        if scope not in BY_NAME[name].scopes:
            other = BY_NAME[name].scopes[0]
            raise UserError(
                f"vhpc bench {scope} has no test {name}", "", f"run: vhpc bench {other} --tests {name}"
            )
    if not names:
        raise UserError("--tests names no test", "", "tests: " + ", ".join(test.name for test in of(scope)))
    return tuple(test for test in of(scope) if test.name in names)


def sizes(given: Sequence[str]) -> dict[str, int]:
    """All sizes, with the ``NAME=N`` of ``--size``.

    Raises:
        UserError: an unknown name, or a value out of range.
    """
    values = {name: default for name, (default, _, _, _) in SIZES.items()}
    for item in given:
        name, _, value = item.partition("=")
        if name not in SIZES:
            raise UserError(f"there is no size {name[:40]!r}", "", "sizes: " + ", ".join(SIZES))
        _, low, high, _ = SIZES[name]
        if not (value.isascii() and value.isdecimal() and len(value) < 12 and low <= int(value) <= high):
            raise UserError(f"--size {name} is {value[:40]!r}", f"not a number from {low} to {high}")
        values[name] = int(value)
    return values
