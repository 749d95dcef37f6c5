# SPDX-License-Identifier: Apache-2.0
"""MPI libraries of another Debian release than that of the nodes, in guests of image debian12-hpc."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from cluster import Lab, publish
from injection import ours
from mpi_program import RING, ring_lines

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(1800)]

IMAGE = "debian12-hpc"
# Two ranks share the emulated CPU of a guest: they yield instead of spinning.
YIELD = "export OMPI_MCA_mpi_yield_when_idle=1 MPIR_CVAR_POLLS_BEFORE_YIELD=1"
WAYS = {
    "srun --mpi=pmix -n4": "openmpi",
    "srun --mpi=pmi2 -n4": "mpich",
    "mpirun.openmpi --map-by ppr:2:node:OVERSUBSCRIBE -n 4": "openmpi",
    "mpirun.mpich -ppn 2 -n 4": "mpich",
}


@pytest.fixture(scope="module")
def _programs(lab: Lab) -> None:
    """``~/ring.mpich`` and ``~/ring.openmpi``, compiled in a guest."""
    publish(IMAGE)
    build = "".join(f"mpicc.{name} -O1 -o ~/ring.{name} ~/ring.c\n" for name in ("mpich", "openmpi"))
    job = lab.finish(f"cat > ~/ring.c <<'END'\n{RING}\nEND\n{build}", "-N1", "-n2", "--mem=900", image=IMAGE)
    assert job.accounted() == ["COMPLETED", "0:0"], job.output()


@pytest.mark.usefixtures("_programs")
@pytest.mark.parametrize("way", WAYS)
def test_ranks_of_two_nodes_find_each_other(lab: Lab, way: str) -> None:
    """MPICH 4.0 does not always end (docs/mpi.md): of it, only the results are compared."""
    ends = WAYS[way] != "mpich"
    run = f"timeout -k 20 {240 if ends else 120} {way} ~/ring.{WAYS[way]}"
    script = f"{{\n{YIELD}\n{run}; echo exit $?\n}} 2>&1"
    job = lab.submit(script, "-N2", "--ntasks-per-node=2", "--mem=900", "--vhpc-network=job", image=IMAGE)
    job.wait(timeout=600)
    found = Counter(job.output().splitlines())
    results = ring_lines("n1", "n1", "n2", "n2")
    assert (found if ends else found & results) == results + Counter(["exit 0"] if ends else [])


@pytest.mark.promise("mpi.no-network")
@pytest.mark.usefixtures("_programs")
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_mpirun_without_a_network_ends_with_one_line(lab: Lab, mpi: str) -> None:
    """By itself that of Open MPI 4.1 names other causes, and that of MPICH never ends."""
    script = f"{{\ntimeout --foreground 240 mpirun.{mpi} -n 4 ~/ring.{mpi}; echo exit $?\n}} 2>&1"
    job = lab.submit(script, "-N2", "--ntasks-per-node=2", "--mem=900", image=IMAGE)
    job.wait(timeout=600)
    line, *rest = job.output().splitlines()
    assert line.startswith(f"vhpc: mpirun.{mpi} starts an MPI program in several guests")
    assert line.endswith("have no network between them: submit the job with --vhpc-network=job")
    assert rest == ["exit 126"]


@pytest.mark.promise("mpi.refuse")
@pytest.mark.usefixtures("_programs")
def test_a_spawn_by_pmix_ends_with_one_line(lab: Lab) -> None:
    script = f"{{\n{YIELD}\ntimeout 240 srun --mpi=pmix -n4 ~/ring.openmpi spawn; echo exit $?\n}} 2>&1"
    job = lab.submit(script, "-N2", "--ntasks-per-node=2", "--mem=900", "--vhpc-network=job", image=IMAGE)
    job.wait(timeout=600)
    text = job.output()
    end = re.search(r"^exit (\d+)$", text, re.M)
    assert end is not None, text
    assert int(end[1]) not in (0, 124), text  # 124: timeout has ended it
    assert set(ours(text)) == {
        f"vhpc: step {job.id}.0 calls MPI_Comm_spawn, which is not possible with srun --mpi=pmix: start the "
        "program with mpirun"
    }
