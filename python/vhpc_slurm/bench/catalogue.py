# SPDX-License-Identifier: Apache-2.0
"""The tests: what each measures, in which unit, and what it needs.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["node", "job"]


@dataclass(frozen=True)
class Metric:
    """One figure of a test.

    Attributes:
        key: its name in the program's output.
        title: its name in reports.
        unit: unit of the reported value.
        higher_is_better: True for rates, False for times.
        factor: what the program's value is multiplied by to get ``unit``.
    """

    key: str
    title: str
    unit: str
    higher_is_better: bool = True
    factor: float = 1.0


@dataclass(frozen=True)
class Benchmark:
    """A test, and how to get its program where it is missing.

    Attributes:
        name: its name in ``--tests`` and in job.sh.
        scopes: the commands that have it.
        meaning: what it does, one clause.
        metrics: its figures.
        packages: Debian packages of its program; empty if vhpc brings it.
        module: what a site's environment module for it is usually named.
    """

    name: str
    scopes: tuple[Scope, ...]
    meaning: str
    metrics: tuple[Metric, ...]
    packages: str = ""
    module: str = ""


TESTS = (
    Benchmark(
        "triad",
        ("node",),
        "memory bandwidth: a = b + s * c, a thread on each CPU",
        (Metric("triad_mb_s", "triad", "MB/s"),),
    ),
    Benchmark(
        "files",
        ("node", "job"),
        "a large file and many small ones in the home directory, from the first node",
        (
            Metric("write_mb_s", "write", "MB/s"),
            Metric("read_mb_s", "read", "MB/s"),
            Metric("create_per_s", "create", "1/s"),
            Metric("stat_per_s", "stat", "1/s"),
            Metric("open_read_per_s", "open, read", "1/s"),
            Metric("remove_per_s", "remove", "1/s"),
        ),
    ),
    Benchmark(
        "pingpong",
        ("job",),
        "MPI messages between the first and the last node: 8 bytes (half a round trip), and 4 MiB",
        (
            Metric("latency_us", "latency", "us", higher_is_better=False),
            Metric("bandwidth_mb_s", "bandwidth", "MB/s"),
        ),
        "openmpi-bin or mpich",
        "openmpi",
    ),
    Benchmark(
        "allreduce",
        ("job",),
        "MPI_Allreduce of 8 bytes over all ranks, time of the slowest",
        (Metric("allreduce_us", "allreduce", "us", higher_is_better=False),),
        "openmpi-bin or mpich",
        "openmpi",
    ),
    Benchmark(
        "lammps",
        ("node", "job"),
        "LAMMPS, Lennard-Jones liquid",
        (Metric("steps_per_s", "time steps", "1/s"),),
        "lammps",
        "lammps",
    ),
    Benchmark(
        "hpcc",
        ("node", "job"),
        "HPC Challenge",
        (
            Metric("HPL_Tflops", "HPL", "Gflop/s", factor=1000),
            Metric("StarDGEMM_Gflops", "DGEMM", "Gflop/s"),
            Metric("StarSTREAM_Triad", "STREAM triad", "GB/s"),
            Metric("PTRANS_GBs", "PTRANS", "GB/s"),
            Metric("MPIRandomAccess_GUPs", "RandomAccess", "GUP/s"),
            Metric("MPIFFT_Gflops", "FFT", "Gflop/s"),
            Metric("RandomlyOrderedRingLatency_usec", "ring latency", "us", higher_is_better=False),
            Metric("RandomlyOrderedRingBandwidth_GBytes", "ring bandwidth", "GB/s"),
        ),
        "hpcc",
        "hpcc",
    ),
)
BY_NAME = {test.name: test for test in TESTS}


def of(scope: Scope) -> tuple[Benchmark, ...]:
    """The tests of a command, in their order."""
    return tuple(test for test in TESTS if scope in test.scopes)
