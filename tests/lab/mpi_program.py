# SPDX-License-Identifier: Apache-2.0
"""An MPI program in C: says where it is, passes a token, adds numbers, does what its arguments say."""

from __future__ import annotations

from collections import Counter

RING = r"""
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NUMBERS = 100000 };

static void ring(int rank, int size)
{
    long token = 0;
    if (rank == 0) {
        token = 1;
        MPI_Send(&token, 1, MPI_LONG, 1 % size, 0, MPI_COMM_WORLD);
    }
    MPI_Recv(&token, 1, MPI_LONG, (rank + size - 1) % size, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    token += rank;
    if (rank != 0)
        MPI_Send(&token, 1, MPI_LONG, (rank + 1) % size, 0, MPI_COMM_WORLD);
    else
        printf("token %ld\n", token);
}

static void add(int rank)
{
    static double own[NUMBERS], sum[NUMBERS];
    double total = 0;
    for (int i = 0; i < NUMBERS; i++)
        own[i] = rank * i;
    MPI_Allreduce(own, sum, NUMBERS, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < NUMBERS; i++)
        total += sum[i];
    printf("sum %.0f\n", total);
}

/* How many ranks a rank shares memory with, and what it sees there. */
static void share(int rank)
{
    MPI_Comm node;
    MPI_Win window;
    MPI_Aint bytes;
    int here, count, unit, *own, *first;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
    MPI_Comm_rank(node, &here);
    MPI_Comm_size(node, &count);
    MPI_Win_allocate_shared(sizeof(int), sizeof(int), MPI_INFO_NULL, node, &own, &window);
    MPI_Win_lock_all(0, window);
    *own = here == 0 ? rank + 100 : 0;
    MPI_Win_sync(window);
    MPI_Barrier(node);
    MPI_Win_sync(window);
    MPI_Win_shared_query(window, 0, &bytes, &unit, &first);
    printf("shares %d with %d\n", count, *first - 100);
    MPI_Win_unlock_all(window);
    MPI_Win_free(&window);
}

int main(int argc, char **argv)
{
    char host[256] = "";
    int rank, size;
    MPI_Comm parent = MPI_COMM_NULL, child;
    setvbuf(stdout, NULL, _IOLBF, 0);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_get_parent(&parent);
    gethostname(host, sizeof host - 1);
    printf("%srank %d of %d on %s\n", parent != MPI_COMM_NULL ? "spawned " : "", rank, size, host);
    ring(rank, size);
    add(rank);
    if (argc > 1 && strcmp(argv[1], "share") == 0)
        share(rank);
    while (argc > 1 && strcmp(argv[1], "endless") == 0)
        add(rank);
    if (argc > 1 && strcmp(argv[1], "die") == 0 && rank == 1)
        raise(SIGKILL);
    if (argc > 1 && strcmp(argv[1], "abort") == 0 && rank == 1)
        MPI_Abort(MPI_COMM_WORLD, 7);
    if (argc > 1 && strcmp(argv[1], "spawn") == 0)
        MPI_Comm_spawn(argv[0], MPI_ARGV_NULL, 1, MPI_INFO_NULL, 0, MPI_COMM_WORLD, &child,
                       MPI_ERRCODES_IGNORE);
    if (argc > 1)
        ring(rank, size);
    MPI_Finalize();
    return argc > 2 && strcmp(argv[1], "code") == 0 && rank == 1 ? atoi(argv[2]) : 0;
}
"""


def ring_lines(*hosts: str) -> Counter[str]:
    """What the program prints if its ranks are on these hosts; sums by arithmetic and not by MPI."""
    size = len(hosts)
    ranks = {f"rank {rank} of {size} on {host}": 1 for rank, host in enumerate(hosts)}
    total = sum(range(size)) * sum(range(100_000))
    return Counter({**ranks, f"token {1 + sum(range(size))}": 1, f"sum {total}": size})
