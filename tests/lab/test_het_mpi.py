# SPDX-License-Identifier: Apache-2.0
"""MPI programs over both components of a heterogeneous job, with guests and without; ssh between guests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import hpc_codes
import pytest
from cluster import Job, Lab, publish
from hpc_codes import NATIVE
from mpi_program import RING, ring_lines

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(1800)]

IMAGE = "debian-hpc"
KINDS = {"pmix": "openmpi", "pmi2": "mpich"}
SIZE = ("-N1", "-n2", "--mem=900")
GUEST = (f"--vhpc-image={IMAGE}", "--vhpc-network=job")
STEPS = "".join(
    f"echo == {pmi}; timeout 400 srun -Q --mpi={pmi} --het-group=0,1 ~/het.{mpi}; echo exit $?\n"
    for pmi, mpi in KINDS.items()
)
BUILD = f"cat > ~/het.c <<'END'\n{RING}\nEND\n" + "".join(
    f"mpicc.{mpi} -O1 -o ~/het.{mpi} ~/het.c\n" for mpi in KINDS.values()
)
OTHER = """
echo == ssh; ssh n2 hostname; ssh n2 ssh n1 hostname; echo exit $?
echo == mpirun
ras='--prtemca ras ^slurm'  # it would only see the nodes of the first component
timeout 400 mpirun.openmpi $ras --prtemca plm ssh --hostfile $VHPC_HOSTFILE -n 4 ~/het.openmpi; echo exit $?
"""


def _run(lab: Lab, script: str, *options: str) -> dict[str, Counter[str]]:
    """Lines of each part of a job's output, in no order."""
    words = ("-w", "n1", *SIZE, *options, ":", "-w", "n2", *SIZE, *options)
    text = f"#!/bin/sh\n{{\n{script}\n}} 2>&1\n"
    done = lab.run("login", "sbatch", "--parsable", *words, user="alice", stdin=text)
    job = Job(lab, int(done.out), "alice")
    job.leave_queue(1500)
    parts = re.split(r"^== (\S+)\n", job.output(), flags=re.M)
    return {name: Counter(text.splitlines()) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.fixture(scope="module")
def outputs(lab: Lab) -> Iterator[list[dict[str, Counter[str]]]]:
    """With guests, in which the program is compiled, and then without."""
    publish(IMAGE)
    hpc_codes.unpack(IMAGE)
    yield [_run(lab, BUILD + STEPS + OTHER, *GUEST), _run(lab, NATIVE + STEPS)]
    hpc_codes.remove()
    lab.run("login", "sh", "-c", "rm -f ~/het.c ~/het.openmpi ~/het.mpich", user="alice")


@pytest.mark.results
@pytest.mark.parametrize("pmi", KINDS)
def test_one_program_runs_in_both_components(outputs: list[dict[str, Counter[str]]], pmi: str) -> None:
    inside, outside = (found[pmi] for found in outputs)
    assert inside == outside
    assert inside == ring_lines("n1", "n1", "n2", "n2") + Counter(["exit 0"])


@pytest.mark.results
def test_ssh_and_mpirun_reach_the_other_component(outputs: list[dict[str, Counter[str]]]) -> None:
    assert outputs[0]["ssh"] == Counter(["n2", "n1", "exit 0"])
    assert outputs[0]["mpirun"] == ring_lines("n1", "n1", "n2", "n2") + Counter(["exit 0"])
