# SPDX-License-Identifier: Apache-2.0
"""LAMMPS and HPCC with four ranks in two guests, started by srun and by mpirun, with Open MPI and MPICH."""

from __future__ import annotations

import re
from collections.abc import Iterator

import hpc_codes
import pytest
from cluster import Job, Lab, publish
from hpc_codes import NATIVE, PLACE, RANKS, WAYS

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(2400)]

IMAGE = "debian-hpc"
GUESTS = ("--vhpc-network=job",)
# A CPU per node, which two ranks share and yield to each other: emulated CPUs that spin slow down all others.
TWO_NODES = ("-N2", "--ntasks-per-node=2", "--overcommit", "--mem=900")
SHARE = """
export OMP_NUM_THREADS=1 SLURM_OVERCOMMIT=1 SLURM_NTASKS_PER_NODE=2
export OMPI_MCA_mpi_yield_when_idle=1 MPIR_CVAR_POLLS_BEFORE_YIELD=1
"""
TABLE = re.compile(r"^ +Step +Temp .*\n(?: +\d+ .*\n)+", re.M)


@pytest.fixture(scope="module", autouse=True)
def _programs(lab: Lab) -> Iterator[None]:
    publish(IMAGE)
    hpc_codes.prepare(IMAGE)
    yield
    hpc_codes.remove()


def _run(lab: Lab, script: str, image: str | None) -> Job:
    before = SHARE if image else SHARE + NATIVE
    options = (*TWO_NODES, *(GUESTS if image else ()))
    job = lab.submit(f"{before}\n{{\n{script}\n}} 2>&1", *options, image=image)
    job.wait(timeout=2000)
    return job


def _tables(job: Job) -> dict[str, tuple[str, str]]:
    """Of each way: LAMMPS's table of thermodynamic output, and the line with ranks, steps and atoms."""
    found = {}
    for part in re.split(r"^== ", job.output(), flags=re.M)[1:]:
        table = TABLE.search(part)
        loop = re.search(r"^Loop time of \S+ (on .*)", part, re.M)
        assert table is not None, part
        assert loop is not None, part
        assert part.endswith("\nexit 0\n"), part
        found[part.split("\n", 1)[0]] = (table[0], loop[1])
    return found


def _lammps(names: list[str]) -> str:
    """LAMMPS's Lennard-Jones liquid of the acceptance test, with a row per two steps."""
    lines = [
        f"sed 's/^thermo .*/thermo 2/' {PLACE}/lj.in > lj.$SLURM_JOB_ID",
        "trap 'rm lj.$SLURM_JOB_ID' EXIT",
    ]
    for name in names:
        command = WAYS[name].command("lmp")
        arguments = "-in lj.$SLURM_JOB_ID -log none -var side 4 -var steps 10"
        lines.append(f"echo == {name}; timeout 400 {command} {arguments} </dev/null; echo exit $?")
    return "\n".join(lines)


@pytest.mark.promise("mpi.lammps")
def test_lammps_prints_the_same_table_in_guests_as_on_nodes(lab: Lab) -> None:
    """Energies and pressure to ten digits."""
    nodes = _tables(_run(lab, _lammps(["srun-pmix", "srun-pmi2"]), None))
    guests = _tables(_run(lab, _lammps(list(WAYS)), IMAGE))
    for name, found in guests.items():
        table, ran = nodes["srun-pmi2" if WAYS[name].mpi == "mpich" else "srun-pmix"]
        assert ran == f"on {RANKS} procs for 10 steps with 256 atoms"
        assert len(table.splitlines()) == 7, table
        assert found == (table, ran), name
    assert set(guests) == set(WAYS)


@pytest.mark.parametrize("name", WAYS)
def test_hpcc_passes_its_own_checks(lab: Lab, name: str) -> None:
    fill = "s/@N@/64/; s/@NB@/16/; s/@P@/2/; s/@Q@/2/"
    script = (
        "mkdir hpcc.$SLURM_JOB_ID && cd hpcc.$SLURM_JOB_ID || exit\n"
        f"sed '{fill}' {PLACE}/hpccinf.in > hpccinf.txt\n"
        f"timeout 1800 {WAYS[name].command('hpcc')} </dev/null; echo exit $?\n"
        "cat hpccoutf.txt; cd .. && rm -r hpcc.$SLURM_JOB_ID\n"
    )
    said = _run(lab, script, IMAGE).output()
    assert "\nexit 0\n" in f"\n{said}", said
    found = dict(re.findall(r"^(\w+)=(\S+)$", said, re.M))
    assert (found["Success"], found["CommWorldProcs"]) == ("1", str(RANKS)), said
    assert "End of HPC Challenge tests" in said
    # PTRANS and HPL print the result of each check
    assert len(re.findall(r"\bPASSED\b", said)) >= 2, said
    assert not re.search(r"\bFAILED\b", said), said
