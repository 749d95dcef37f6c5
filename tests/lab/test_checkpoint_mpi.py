# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of MPI programs that srun has started by PMI or PMIx: they continue in the next step."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from cluster import Job, Lab, publish
from injection import output_meets, prints, said, settled
from pmi_client import CLIENT
from saving import checkpoint, checkpoints_on, requeue, written

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(1500)]

TURNS = 120
PAIR = ("-N2", "--ntasks-per-node=1", "--vhpc-network=job", "--mem=900", "--open-mode=append")
# Ranks exchange a block with both neighbours and add numbers; a wrong byte or sum aborts the program.
EXCHANGE = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { BLOCK = 100000 };

static unsigned char out[BLOCK], in[BLOCK];

int main(int argc, char **argv)
{
    int rank, size, turns = argc > 1 ? atoi(argv[1]) : 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int turn = 1; turn <= turns; turn++) {
        int left = (rank + size - 1) % size;
        long own = (long)turn * (rank + 1), sum = 0;
        for (int i = 0; i < BLOCK; i++)
            out[i] = (unsigned char)(i * 7 + turn + rank);
        MPI_Sendrecv(out, BLOCK, MPI_BYTE, (rank + 1) % size, turn, in, BLOCK, MPI_BYTE, left, turn,
                     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int i = 0; i < BLOCK; i++)
            if (in[i] != (unsigned char)(i * 7 + turn + left))
                MPI_Abort(MPI_COMM_WORLD, 9);
        MPI_Allreduce(&own, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
        if (sum != (long)turn * size * (size + 1) / 2)
            MPI_Abort(MPI_COMM_WORLD, 8);
        if (rank == 0) {
            printf("turn %d\n", turn);
            fflush(stdout);
        }
        usleep(100000);
    }
    MPI_Finalize();
    return 3 + rank;
}
"""
# Ranks exchange nothing before a file is there; then each meets all others. Open MPI connects them only then.
MEET = r"""
#include <mpi.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    printf("up\n");
    fflush(stdout);
    while (access(argv[1], F_OK) != 0)
        usleep(100000);
    for (int step = 1; step < size; step++) {
        int to = (rank + step) % size, from = (rank + size - step) % size, out = 100 * rank + to, in = 0;
        MPI_Sendrecv(&out, 1, MPI_INT, to, step, &in, 1, MPI_INT, from, step, MPI_COMM_WORLD,
                     MPI_STATUS_IGNORE);
        printf("%d met %d: %d\n", rank, from, in);
    }
    MPI_Finalize();
    return 5;
}
"""


@pytest.fixture(scope="module", autouse=True)
def _checkpoints(lab: Lab) -> Iterator[None]:
    with checkpoints_on(lab):
        yield


def reaches(lab: Lab, job: Job, turn: int) -> None:
    """Wait for a turn of the exchange."""
    prints(job, f"turn {turn}\n", 600)


@pytest.fixture(scope="module")
def exchange(lab: Lab) -> Iterator[str]:
    """The programs, compiled in a guest: ``~/exchange.pmi2`` of MPICH, others of Open MPI; the image."""
    image = "debian-hpc"
    publish(image)
    build = (
        f"cat > ~/exchange.c <<'END'\n{EXCHANGE}\nEND\ncat > ~/meet.c <<'END'\n{MEET}\nEND\n"
        "mpicc.mpich -O1 -o ~/exchange.pmi2 ~/exchange.c && "
        "mpicc.openmpi -O1 -o ~/exchange.pmix ~/exchange.c && mpicc.openmpi -O1 -o ~/meet ~/meet.c"
    )
    job = lab.finish(build, "-N1", "-n1", "--mem=900", image=image)
    assert job.accounted() == ["COMPLETED", "0:0"], job.output()
    yield image
    lab.run("login", "sh", "-c", "rm -f ~/exchange.* ~/meet ~/meet.c ~/go", user="alice")


@pytest.mark.promise("checkpoint.pmi")
@pytest.mark.parametrize("kind", ["pmi2", "pmix"])
def test_an_mpi_program_continues_in_place_and_in_later_runs(lab: Lab, exchange: str, kind: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    moments, seen = random.Random(seed), 0
    job = lab.submit(f"srun --mpi={kind} ~/exchange.{kind} {TURNS}; echo status $?", *PAIR, image=exchange)
    for number, turn in enumerate(sorted(moments.sample(range(2, TURNS - 20), 6))):
        reaches(lab, job, max(turn, seen + 1))
        if number % 2:
            requeue(lab, job, (number + 1) // 2)
        else:
            checkpoint(lab, str(job.id))
        seen = said(lab, job).count("turn ")  # it has saved the last one of these
    assert job.wait(timeout=600) == "COMPLETED", said(lab, job)
    assert written(job) == [*(f"turn {turn}" for turn in range(1, TURNS + 1)), "status 4"], job.output()
    settled(lab)


@pytest.mark.promise("checkpoint.pmi")
@pytest.mark.parametrize("saves", [10, 1], ids=["in place", "later run"])
def test_ranks_of_open_mpi_meet_after_a_checkpoint(lab: Lab, exchange: str, saves: int) -> None:
    """In place, the number of the last step is longer than that of the first one."""
    lab.run("login", "sh", "-c", "rm -f ~/go", user="alice")
    options = ("-N2", "--ntasks-per-node=2", "--vhpc-network=job", "--mem=1400", "--open-mode=append")
    job = lab.submit("srun --mpi=pmix ~/meet ~/go; echo status $?", *options, image=exchange)
    output_meets(job, lambda text: text.count("up\n") == 4, f"all tasks of job {job.id}", 300)
    for _ in range(saves):
        if saves > 1:
            checkpoint(lab, str(job.id))
        else:
            requeue(lab, job)
    lab.run("login", "sh", "-c", "touch ~/go", user="alice")
    assert job.wait(timeout=300) == "COMPLETED", said(lab, job)
    pairs = [(rank, other) for rank in range(4) for other in range(4) if rank != other]
    met = [f"{rank} met {other}: {100 * other + rank}" for rank, other in pairs]
    found = [line for line in written(job) if not line.startswith("vhpc: the guests are emulated")]
    assert sorted(found) == sorted([*met, *["up"] * 4, "status 5"]), job.output()
    settled(lab)


@pytest.mark.promise("checkpoint.pmi")
@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("guests", [1, 2])
def test_values_of_a_pmi_server_are_there_in_the_next_run(lab: Lab, version: str, guests: int) -> None:
    """Read for the first time in the next run; with several guests on a node each of them is a node."""
    read = "names = [value("
    assert CLIENT.count(read) == 1
    pause = f"import time\nprint('up', flush=True)\ntime.sleep(15)\n{read}"
    script = f"cat > ~/client.py <<'END'\n{CLIENT.replace(read, pause)}\nEND\n"
    options = ("-N2", f"--ntasks-per-node={guests}", "--vhpc-network=job", "--open-mode=append")
    more = ("--vhpc-guests-per-node=2", "--mem=1400") if guests > 1 else ()
    job = lab.submit(
        f"{script}srun --mpi=pmi2 python3 ~/client.py {version}; echo status $?", *options, *more
    )
    tasks = 2 * guests
    output_meets(job, lambda text: text.count("up\n") == tasks, f"all tasks of job {job.id}", 300)
    time.sleep(1)
    requeue(lab, job)
    assert job.wait(timeout=300) == "COMPLETED", said(lab, job)
    names = [f"n{node}" if guests == 1 else f"n{node}-g{guest}" for node in (1, 2) for guest in range(guests)]
    found = Counter(line for line in written(job) if not line.startswith("mapping"))
    wanted = Counter({"up": tasks, f"hosts {' '.join(names)}": tasks, "end b''": tasks, "status 0": 1})
    assert found == wanted, job.output()
    settled(lab)
