# SPDX-License-Identifier: Apache-2.0
"""MPI libraries of another Debian release than that of the nodes, in guests of image debian12-hpc."""

from __future__ import annotations

import subprocess
from collections import Counter

import pytest
from cluster import ROOT, Lab, without_retries
from mpi_program import RING, ring_lines

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(1800)]

IMAGE = "debian12-hpc"
# Two ranks share the emulated CPU of a guest: they yield instead of spinning.
YIELD = "export OMPI_MCA_mpi_yield_when_idle=1 MPIR_CVAR_POLLS_BEFORE_YIELD=1"
# Open MPI 4.1 cannot end without the variable; MPICH by pmi2 does not end reliably yet (docs/mpi.md).
WAYS = {
    "env OMPI_MCA_mpi_dynamics_enabled=1 srun --mpi=pmix -n4": "openmpi",
    "mpirun.openmpi --map-by ppr:2:node:OVERSUBSCRIBE -n 4": "openmpi",
    "mpirun.mpich -ppn 2 -n 4": "mpich",
}


@pytest.fixture(scope="module")
def _programs(lab: Lab) -> None:
    """``~/ring.mpich`` and ``~/ring.openmpi``, compiled in a guest."""
    subprocess.run([ROOT / "scripts/publish-image", IMAGE], check=True, timeout=3600)
    build = "".join(f"mpicc.{name} -O1 -o ~/ring.{name} ~/ring.c\n" for name in ("mpich", "openmpi"))
    job = lab.finish(f"cat > ~/ring.c <<'END'\n{RING}\nEND\n{build}", "-N1", "-n2", "--mem=900", image=IMAGE)
    assert job.accounted() == ["COMPLETED", "0:0"], job.output()


@pytest.mark.usefixtures("_programs")
@pytest.mark.parametrize("way", WAYS)
def test_ranks_of_two_nodes_find_each_other(lab: Lab, way: str) -> None:
    script = f"{{\n{YIELD}\ntimeout 240 {way} ~/ring.{WAYS[way]}; echo exit $?\n}} 2>&1"
    job = lab.submit(script, "-N2", "--ntasks-per-node=2", "--mem=900", "--vhpc-network=job", image=IMAGE)
    job.wait(timeout=600)
    found = Counter(without_retries(job.output()).splitlines())
    assert found == ring_lines("n1", "n1", "n2", "n2") + Counter(["exit 0"])
