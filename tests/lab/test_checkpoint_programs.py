# SPDX-License-Identifier: Apache-2.0
"""Programs that are saved twenty times at random moments, in place and by requeue: no wrong byte."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import IMAGE, Job, Lab, publish, vlab_status
from injection import output_meets, said, settled
from saving import checkpoint, checkpoints_on, requeue, written

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(2400)]

TIMES = 20
HPC = "debian-hpc"
ONE = ("-n1", "--mem=900", "--open-mode=append")
PAIR = ("-N2", "--ntasks-per-node=1", "--vhpc-network=job", "--mem=900", "--open-mode=append")
# A database in the home folder gets a row per transaction until the user lets the program end.
DATABASE = """
import hashlib, os, sqlite3, time
job = os.environ["SLURM_JOB_ID"]
base = sqlite3.connect(os.path.expanduser(f"~/{job}.sqlite"), isolation_level=None)
base.execute("CREATE TABLE row (turn INTEGER PRIMARY KEY, data BLOB)")
turn = 0
while not os.path.exists(os.path.expanduser(f"~/go-{job}")):
    turn += 1
    base.execute("INSERT INTO row VALUES (?, ?)", (turn, hashlib.sha256(b"%d" % turn).digest() * 500))
    print("turn", turn, flush=True)
    time.sleep(0.05)
"""
# A client and a kernel of Jupyter, which talk by ZeroMQ; the state is in the kernel.
NOTEBOOK = """
import os, time
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="python3", startup_timeout=300)
client.execute_interactive("turn = 0", timeout=300)
while not os.path.exists(os.path.expanduser(f"~/go-{os.environ['SLURM_JOB_ID']}")):
    client.execute_interactive("turn += 1; print('turn', turn)", timeout=None,
        output_hook=lambda message: print(message["content"].get("text", ""), end="", flush=True))
    time.sleep(0.05)
client.stop_channels()
manager.shutdown_kernel()
"""
# Ranks exchange 2 MB with a neighbour, put blocks into its memory, and write to one file of all ranks.
MPI = r"""
#include <mpi.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = 2 << 20, PART = 4096 };

static unsigned char out[BLOCK], in[BLOCK], window[PART];

static void expect(int right)
{
    if (!right)
        MPI_Abort(MPI_COMM_WORLD, 9);
}

int main(int argc, char **argv)
{
    int rank, size, go = 0;
    char name[4096];
    MPI_File file;
    MPI_Win memory;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    snprintf(name, sizeof name, "%s.data", argv[1]);
    expect(MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_CREATE | MPI_MODE_WRONLY, MPI_INFO_NULL,
                         &file) == MPI_SUCCESS);
    MPI_Win_create(window, PART, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &memory);
    for (int turn = 1; !go; turn++) {
        int left = (rank + size - 1) % size, right = (rank + 1) % size;
        for (int i = 0; i < BLOCK; i++)
            out[i] = (unsigned char)(i * 7 + turn + rank);
        MPI_Sendrecv(out, BLOCK, MPI_BYTE, right, turn, in, BLOCK, MPI_BYTE, left, turn,
                     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int i = 0; i < BLOCK; i++)
            expect(in[i] == (unsigned char)(i * 7 + turn + left));
        MPI_Win_fence(0, memory);
        MPI_Put(out, PART, MPI_BYTE, right, 0, PART, MPI_BYTE, memory);
        MPI_Win_fence(0, memory);
        expect(memcmp(window, in, PART) == 0);
        memset(window, turn, PART);
        expect(MPI_File_write_at(file, ((MPI_Offset)(turn - 1) * size + rank) * PART, window, PART,
                                 MPI_BYTE, MPI_STATUS_IGNORE) == MPI_SUCCESS);
        if (rank == 0) {
            printf("turn %d\n", turn);
            fflush(stdout);
            go = access(argv[1], F_OK) == 0;
        }
        MPI_Bcast(&go, 1, MPI_INT, 0, MPI_COMM_WORLD);
        usleep(50000);
    }
    MPI_Win_free(&memory);
    MPI_File_close(&file);
    MPI_Finalize();
    return 0;
}
"""


@pytest.fixture(scope="module", autouse=True)
def _checkpoints(lab: Lab) -> Iterator[None]:
    with checkpoints_on(lab):
        yield


def turns(text: str) -> list[int]:
    """The turns that a program has written."""
    return [int(line.removeprefix("turn ")) for line in text.splitlines() if line.startswith("turn ")]


def takes_turn(lab: Lab, job: Job) -> None:
    """Wait until the program of a job that runs has taken one more turn."""
    before = len(turns(said(lab, job)))
    output_meets(job, lambda text: len(turns(text)) > before, f"a turn of job {job.id}", 600)
    assert job.queued(), job.told()


def saved_often(lab: Lab, job: Job) -> int:
    """Save a job at random moments, every fifth time with a requeue; let it end, and return its last turn."""
    seed, runs = random.randrange(1 << 32), 0
    print("seed", seed)
    moments = random.Random(seed)
    for number in range(1, TIMES + 1):
        takes_turn(lab, job)
        time.sleep(moments.uniform(0.0, 2.0))
        if number % 5:
            checkpoint(lab, str(job.id))
        else:
            runs += 1
            requeue(lab, job, runs)
    lab.run("login", "touch", f"/home/alice/go-{job.id}", user="alice")
    assert job.wait(timeout=600) == "COMPLETED", said(lab, job)
    found = turns(job.output())
    assert found == list(range(1, len(found) + 1)), job.output()
    assert [line for line in written(job) if not line.startswith("turn ")] == ["status 0"], job.output()
    settled(lab)
    return len(found)


def program(text: str, command: str) -> str:
    """A script that writes a program to a file and starts it."""
    return f"cat > ~/saved.py <<'END'\n{text}\nEND\n{command}; echo status $?"


@pytest.mark.promise("checkpoint.programs")
def test_a_database_in_the_home_folder_has_each_row_once(lab: Lab) -> None:
    job = lab.submit(program(DATABASE, "python3 ~/saved.py"), *ONE)
    last = saved_often(lab, job)
    look = (
        "import sqlite3, sys\n"
        f"base = sqlite3.connect('/home/alice/{job.id}.sqlite')\n"
        "print(base.execute('PRAGMA integrity_check').fetchone()[0])\n"
        "for turn, data in base.execute('SELECT turn, hex(data) FROM row ORDER BY turn'):\n"
        "    print(turn, data[:64] * 500 == data and data[:64].lower())\n"
    )
    done = lab.run("login", "python3", "-", stdin=look, user="alice")
    wanted = [f"{turn} {hashlib.sha256(b'%d' % turn).hexdigest()}" for turn in range(1, last + 1)]
    assert done.out.splitlines() == ["ok", *wanted]


@pytest.fixture(scope="module")
def jupyter() -> Iterator[str]:
    """A folder that guests see, with Jupyter's kernel and client for Python 3.13 of the image."""
    place = Path(vlab_status()["paths"]["scratch"], "jupyter")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:", "--python-version=3.13")
    subprocess.run([*pip, f"--target={place}", "ipykernel==6.30.1"], check=True, timeout=600)
    yield "/scratch/jupyter"
    subprocess.run(["rm", "-rf", place], check=True)


@pytest.mark.promise("checkpoint.programs")
def test_a_jupyter_kernel_answers_each_cell_once(lab: Lab, jupyter: str) -> None:
    start = f"export PYTHONPATH={jupyter} JUPYTER_PATH={jupyter}/share/jupyter; python3 ~/saved.py 2>&1"
    saved_often(lab, lab.submit(program(NOTEBOOK, start), *ONE, image=IMAGE))


@pytest.mark.promise("checkpoint.programs")
def test_large_messages_puts_and_files_of_mpi_continue(lab: Lab) -> None:
    publish(HPC)
    build = f"cat > ~/saved.c <<'END'\n{MPI}\nEND\nmpicc.mpich -O2 -o ~/saved ~/saved.c"
    assert lab.finish(build, "-n1", "--mem=900", image=HPC).accounted() == ["COMPLETED", "0:0"]
    job = lab.submit("srun --mpi=pmi2 ~/saved ~/go-$SLURM_JOB_ID; echo status $?", *PAIR, image=HPC)
    last = saved_often(lab, job)
    wanted = hashlib.sha256(b"".join(bytes([turn % 256]) * 8192 for turn in range(1, last + 1))).hexdigest()
    assert lab.run("login", "sha256sum", f"/home/alice/go-{job.id}.data").out.split()[0] == wanted
