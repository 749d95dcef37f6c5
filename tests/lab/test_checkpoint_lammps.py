# SPDX-License-Identifier: Apache-2.0
"""LAMMPS over two guests is saved three times and continues: its table is that of an uninterrupted run.

It continues in place, and twice on other nodes: start the lab by `lab/vlab up --nodes 4`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager

import hpc_codes
import pytest
from cluster import Job, Lab, publish
from hpc_codes import PLACE, WAYS
from injection import output_meets, said, settled
from saving import checkpoint, checkpoints_on, requeue

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(2400)]

IMAGE = "debian-hpc"
STEPS, EVERY = 200, 2
# A CPU per node, which two ranks share and yield to each other: emulated CPUs that spin slow down others.
SHAPE = ("-N2", "--ntasks-per-node=2", "--overcommit", "--mem=900")
OPTIONS = (*SHAPE, "--vhpc-network=job", "--open-mode=append")
SCRIPT = f"""
export OMP_NUM_THREADS=1 SLURM_OVERCOMMIT=1 SLURM_NTASKS_PER_NODE=2
export OMPI_MCA_mpi_yield_when_idle=1 MPIR_CVAR_POLLS_BEFORE_YIELD=1
sed 's/^thermo .*/thermo {EVERY}/; s/^thermo_modify .*/& flush yes/' {PLACE}/lj.in > lj.$SLURM_JOB_ID
COMMAND -in lj.$SLURM_JOB_ID -log none -var side 4 -var steps {STEPS} </dev/null
echo status $?; rm lj.$SLURM_JOB_ID
"""
ROW = re.compile(r" +\d+(?: +-?[0-9.e+-]+){4}$")


@pytest.fixture(scope="module", autouse=True)
def _programs(lab: Lab) -> Iterator[None]:
    if len(lab.nodes) < 4:
        pytest.skip("a job of two nodes changes its nodes: start the lab by `lab/vlab up --nodes 4`")
    publish(IMAGE)
    hpc_codes.prepare(IMAGE)
    with checkpoints_on(lab):
        yield
    hpc_codes.remove()


def table(text: str) -> list[str]:
    """Rows of LAMMPS's thermodynamic output: step, temperature, energies and pressure to ten digits."""
    return [line for line in text.splitlines() if ROW.match(line)]


def reaches(lab: Lab, job: Job, rows: int) -> None:
    """Wait for so many rows of a job that runs, at least one of them new."""
    rows = max(rows, len(table(said(lab, job))) + 1)
    output_meets(job, lambda text: len(table(text)) >= rows, f"row {rows} of job {job.id}", 900)
    assert job.queued(), job.told()


@contextmanager
def elsewhere(lab: Lab, job: Job) -> Iterator[None]:
    """A run that starts within is on other nodes than the present one."""
    nodes = job.show()["NodeList"]
    lab.run("ctl", "scontrol", "update", f"NodeName={nodes}", "State=DRAIN", "Reason=test")
    try:
        yield
        assert job.show()["NodeList"] != nodes
    finally:
        lab.run("ctl", "scontrol", "update", f"NodeName={nodes}", "State=RESUME")


@pytest.mark.promise("checkpoint.lammps")
@pytest.mark.parametrize("way", WAYS)
def test_lammps_prints_the_table_of_an_uninterrupted_run(lab: Lab, way: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    script = SCRIPT.replace("COMMAND", WAYS[way].command("lmp"))
    alone = lab.submit(script, *OPTIONS, image=IMAGE)
    assert alone.wait(timeout=900) == "COMPLETED", alone.told()
    rows = table(alone.output())
    assert len(rows) == STEPS // EVERY + 1, alone.output()

    job = lab.submit(script, *OPTIONS, image=IMAGE)
    for number, row in enumerate(sorted(random.Random(seed).sample(range(2, len(rows) // 2), 3))):
        reaches(lab, job, row)
        if number == 1:
            checkpoint(lab, str(job.id))
            continue
        with elsewhere(lab, job):
            requeue(lab, job, (number + 2) // 2)
            reaches(lab, job, 0)
    assert job.wait(timeout=900) == "COMPLETED", said(lab, job)
    assert table(job.output()) == rows
    assert job.output().count("status 0\n") == 1, job.output()
    settled(lab)
