# SPDX-License-Identifier: Apache-2.0
"""The MPI program of bench/collectives, in C: it is compiled in a guest, where the MPI library is."""

MARKER = "bench-collectives:"
SOURCE = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { LEAST = 5, MOST = 51, LARGEST = 1 << 20 };
static const double BUDGET_S = 0.5; /* for the repetitions of one collective with one size */
static double *from, *to;
static int ranks;

static void barrier(int bytes)
{
    (void)bytes;
    MPI_Barrier(MPI_COMM_WORLD);
}

static void bcast(int bytes)
{
    MPI_Bcast(from, bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
}

static void allreduce(int bytes)
{
    MPI_Allreduce(from, to, bytes / (int)sizeof *from, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    if (to[0] != ranks)
        MPI_Abort(MPI_COMM_WORLD, 1);
}

static void alltoall(int bytes)
{
    MPI_Alltoall(from, bytes, MPI_BYTE, to, bytes, MPI_BYTE, MPI_COMM_WORLD);
    if (to[0] != 1)
        MPI_Abort(MPI_COMM_WORLD, 1);
}

static const struct {
    const char *name;
    void (*call)(int);
} collectives[] = {{"barrier", barrier}, {"bcast", bcast}, {"allreduce", allreduce}, {"alltoall", alltoall}};
static const int sizes[] = {8, 1024, 65536, LARGEST};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Seconds of the slowest rank, the same on all. */
static double slowest(void (*call)(int), int bytes)
{
    double own, all, began = now();
    call(bytes);
    own = now() - began;
    MPI_Allreduce(&own, &all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return all;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median; the first call, which may connect ranks, decides only on the number of repetitions. */
static double median(void (*call)(int), int bytes)
{
    double all[MOST], first = slowest(call, bytes);
    int count = first * MOST < BUDGET_S ? MOST : (int)(BUDGET_S / first);
    if (count < LEAST)
        count = LEAST;
    for (int i = 0; i < count; i++)
        all[i] = slowest(call, bytes);
    qsort(all, (size_t)count, sizeof *all, compare);
    return all[count / 2];
}

int main(int argc, char **argv)
{
    int rank;
    double before = now(), init, first;
    MPI_Init(&argc, &argv);
    init = now() - before;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    first = slowest(barrier, 0);
    if (rank == 0)
        printf("bench-collectives: {\"ranks\": %d, \"init\": %.6f, \"first\": %.6f", ranks, init, first);
    from = malloc((size_t)ranks * LARGEST);
    to = malloc((size_t)ranks * LARGEST);
    if (from == NULL || to == NULL)
        MPI_Abort(MPI_COMM_WORLD, 1);
    for (size_t i = 0; i < (size_t)ranks * LARGEST / sizeof *from; i++)
        from[i] = 1;
    for (size_t c = 0; argc == 1 && c < sizeof collectives / sizeof *collectives; c++)
        for (size_t s = 0; s < (c == 0 ? 1 : sizeof sizes / sizeof *sizes); s++) {
            double found = median(collectives[c].call, sizes[s]);
            if (rank == 0 && c == 0)
                printf(", \"%s\": %.7f", collectives[c].name, found);
            else if (rank == 0)
                printf(", \"%s %d\": %.7f", collectives[c].name, sizes[s], found);
        }
    if (rank == 0)
        printf("}\n");
    return MPI_Finalize();
}
"""
