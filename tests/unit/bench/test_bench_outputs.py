# SPDX-License-Identifier: Apache-2.0
"""vhpc bench reads what the real programs printed (data/bench), and refuses what is not a result."""

from __future__ import annotations

from pathlib import Path

import pytest

from vhpc_slurm.bench.catalogue import BY_NAME
from vhpc_slurm.bench.outputs import Figures, OutputError, pairs, parse, reason

DATA = Path(__file__).parents[2] / "data/bench"


def text(name: str) -> str:
    return (DATA / name).read_text()


def read(test: str, name: str = "", ranks: int = 2) -> Figures:
    return parse(BY_NAME[test], text(name or f"{test}.out"), ranks)


def test_lammps_gives_steps_per_second_and_the_energy() -> None:
    found = read("lammps")
    # LAMMPS itself prints 193.096 timesteps/s
    assert found.values == {"steps_per_s": pytest.approx(193.096, abs=0.001)}
    assert found.version == "LAMMPS 4 Feb 2025"
    assert found.answer == -4.623256058


def test_hpcc_gives_its_summary() -> None:
    found = read("hpcc")
    assert found.version == "HPCC 1.5.0"
    assert found.values == {
        "HPL_Tflops": pytest.approx(0.211932),  # Gflop/s; HPCC prints Tflop/s
        "StarDGEMM_Gflops": 0.684735,
        "StarSTREAM_Triad": 72.8066,
        "PTRANS_GBs": 2.92691,
        "MPIRandomAccess_GUPs": 0.0240058,
        "MPIFFT_Gflops": 6.29975,
        "RandomlyOrderedRingLatency_usec": 0.136014,
        "RandomlyOrderedRingBandwidth_GBytes": 9.87811,
    }


@pytest.mark.parametrize(
    ("test", "name", "values", "version"),
    [
        ("triad", "triad.out", 1, ""),
        ("files", "files.out", 6, ""),
        ("pingpong", "pingpong.out", 2, "Open MPI v5.0.7, package"),
        ("pingpong", "pingpong-mpich.out", 2, "MPICH Version:      4.2.1"),
        ("allreduce", "allreduce.out", 1, "Open MPI v5.0.7, package"),
    ],
)
def test_own_programs_give_all_figures(test: str, name: str, values: int, version: str) -> None:
    found = read(test, name)
    written = pairs(text(name))
    assert len(found.values) == values
    assert found.values == {key: float(written[key]) for key in found.values}
    assert found.version.startswith(version)


@pytest.mark.parametrize("test", ["lammps", "hpcc"])
def test_ranks_without_a_common_world_give_no_result(test: str) -> None:
    with pytest.raises(OutputError, match=r"on 2 ranks instead of (once on )?4: its MPI library"):
        read(test, ranks=4)


def test_several_runs_at_once_give_no_result() -> None:
    with pytest.raises(OutputError, match="ran 2 times"):
        parse(BY_NAME["lammps"], text("lammps.out") * 2, 2)


@pytest.mark.parametrize("test", list(BY_NAME))
def test_a_truncated_output_gives_no_result(test: str) -> None:
    whole = text(f"{test}.out")
    for part in ("", whole[: len(whole) // 3]):
        with pytest.raises(OutputError):
            parse(BY_NAME[test], part, 2)


def test_hpcc_that_failed_or_lacks_hpl_gives_no_result() -> None:
    whole = text("hpcc.out")
    with pytest.raises(OutputError, match="Success is not 1"):
        parse(BY_NAME["hpcc"], whole.replace("\nSuccess=1\n", "\nSuccess=0\n"), 2)
    with pytest.raises(OutputError, match="HPL"):
        parse(BY_NAME["hpcc"], whole.replace("HPL_Tflops=0.000211932", "HPL_Tflops=-1"), 2)


def test_figures_that_hpcc_did_not_measure_are_left_out() -> None:
    whole = text("hpcc.out").replace("MPIFFT_Gflops=6.29975", "MPIFFT_Gflops=-1")
    assert "MPIFFT_Gflops" not in parse(BY_NAME["hpcc"], whole, 2).values


@pytest.mark.parametrize("value", ["0", "-3", "nan", "inf", "1e999", "x", ""])
def test_a_figure_is_a_positive_number(value: str) -> None:
    with pytest.raises(OutputError, match="triad_mb_s"):
        parse(BY_NAME["triad"], f"threads 2\ntriad_mb_s {value}\n", 2)


@pytest.mark.parametrize("energy", ["nan", "-nan", "inf", "lost"])
def test_a_simulation_that_exploded_gives_no_result(energy: str) -> None:
    with pytest.raises(OutputError, match="total energy"):
        parse(BY_NAME["lammps"], text("lammps.out").replace("-4.623256058", energy), 2)


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("", ""),
        (text("singleton.err"), text("singleton.err").strip()),
        ("lmp is not installed, or not in PATH\n", "lmp is not installed, or not in PATH"),
        (
            "srun: error: Invalid MPI type 'pmi9', --mpi=list for acceptable types\n",
            "srun: error: Invalid MPI type 'pmi9', --mpi=list for acceptable types",
        ),
        (
            "vhpc-measure-mpi: no MPI library is installed\nsrun: error: n1: task 0: Exited with exit code 3",
            "vhpc-measure-mpi: no MPI library is installed",
        ),
        ("srun: error: n1: task 0: Killed\n", "srun: error: n1: task 0: Killed"),
        ("ERROR: bad\x1b[2J\nsrun: error: n1: task 0: Exited with exit code 1\n", "ERROR: bad\\x1b[2J"),
    ],
)
def test_the_most_informative_line_is_found(stderr: str, line: str) -> None:
    assert reason(stderr) == line
