/* SPDX-License-Identifier: Apache-2.0 */
/* vhpc-measure-mpi: ping-pong and allreduce of `vhpc bench`.
 *
 * It is started as the ranks of an MPI program, and needs the C library and an MPI library.  Rank 0
 * prints a name and a value per line. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "measure.h"
#include "mpi_library.h"

#define SMALL 8                 /* bytes of a message for the latency */
#define LARGE (4 * 1024 * 1024) /* and for the bandwidth */
#define LARGE_PART 20           /* large messages are this many times fewer */
#define STATUS_SIZE 256         /* more than MPI_Status has in any library */
#define TAG 1

static const char USAGE[] =
    "usage: vhpc-measure-mpi openmpi|mpich pingpong|allreduce RANKS COUNT\n";

struct session {
    struct mpi mpi;
    int rank;
    int size;
};

/* End all ranks; a rank that only exits may leave the others waiting. */
static _Noreturn void fail(const struct session *session, const char *what)
{
    measure_complain(0, "rank %d: %s", session->rank, what);
    (void)session->mpi.abort(session->mpi.world, MEASURE_FAILED);
    exit(MEASURE_FAILED);
}

static void must(const struct session *session, int result, const char *what)
{
    if (result != 0) {
        fail(session, what);
    }
}

static void send(const struct session *session, const void *data, int size, int to)
{
    const struct mpi *mpi = &session->mpi;
    must(session, mpi->send(data, size, mpi->byte, to, TAG, mpi->world), "MPI_Send failed");
}

static void receive(const struct session *session, void *data, int size, int from)
{
    const struct mpi *mpi = &session->mpi;
    unsigned char status[STATUS_SIZE];
    must(session, mpi->receive(data, size, mpi->byte, from, TAG, mpi->world, status),
         "MPI_Recv failed");
}

/* Seconds of one round trip between the first and the last rank; 0 in the others. */
static double round_trip(const struct session *session, unsigned char *data, int size, long count)
{
    int last = session->size - 1;
    long warm = count / 10 + 1;
    double start = 0;
    must(session, session->mpi.barrier(session->mpi.world), "MPI_Barrier failed");
    if (session->rank != 0 && session->rank != last) {
        return 0;
    }
    measure_fill(data, (size_t)size, (uint32_t)session->rank + 7);
    for (long i = 0; i < warm + count; i++) {
        if (i == warm) {
            start = measure_now();
        }
        if (session->rank == 0) {
            send(session, data, size, last);
            memset(data, 0, SMALL);
            receive(session, data, size, last);
        } else {
            receive(session, data, size, 0);
            send(session, data, size, 0);
        }
    }
    double seconds = (measure_now() - start) / (double)count;
    /* both ranks now have the data that rank 0 sent first */
    if (measure_check(data, (size_t)size, 7) != (size_t)size) {
        fail(session, "the message has changed on its way");
    }
    return seconds;
}

static void pingpong(const struct session *session, long count)
{
    static unsigned char data[LARGE];
    double latency = round_trip(session, data, SMALL, count) / 2;
    double time = round_trip(session, data, LARGE, count / LARGE_PART + 1) / 2;
    if (session->rank == 0) {
        printf("latency_us %.3f\nbandwidth_mb_s %.2f\n", latency * 1e6, LARGE / time / 1e6);
    }
}

/* The mean time of one allreduce of one double, of the slowest rank. */
static void allreduce(const struct session *session, long count)
{
    const struct mpi *mpi = &session->mpi;
    double mine = session->rank + 1;
    double total = 0;
    double start = 0;
    long warm = count / 10 + 1;
    must(session, mpi->barrier(mpi->world), "MPI_Barrier failed");
    for (long i = 0; i < warm + count; i++) {
        if (i == warm) {
            start = measure_now();
        }
        must(session, mpi->allreduce(&mine, &total, 1, mpi->number, mpi->sum, mpi->world),
             "MPI_Allreduce failed");
    }
    double seconds = (measure_now() - start) / (double)count;
    double slowest = 0;
    double expected = (double)session->size * (session->size + 1) / 2;
    if (total < expected - 0.5 || total > expected + 0.5) {
        fail(session, "MPI_Allreduce has returned a wrong sum");
    }
    must(session, mpi->allreduce(&seconds, &slowest, 1, mpi->number, mpi->maximum, mpi->world),
         "MPI_Allreduce failed");
    if (session->rank == 0) {
        printf("allreduce_us %.3f\n", slowest * 1e6);
    }
}

/* The version up to its first line break, and the number of ranks. */
static void introduce(const struct session *session)
{
    char version[8192] = ""; /* MPI_MAX_LIBRARY_VERSION_STRING of MPICH */
    int length = 0;
    if (session->rank == 0 && session->mpi.version(version, &length) == 0) {
        version[strcspn(version, "\r\n")] = '\0';
        printf("library %s\nranks %d\n", version, session->size);
    }
}

int main(int argc, char **argv)
{
    struct session session = {.rank = 0};
    long ranks = 0;
    long count = 0;
    bool open_mpi = argc == 5 && strcmp(argv[1], "openmpi") == 0;
    bool ping = argc == 5 && strcmp(argv[2], "pingpong") == 0;
    if (argc != 5 || (!open_mpi && strcmp(argv[1], "mpich") != 0) ||
        (!ping && strcmp(argv[2], "allreduce") != 0)) {
        (void)fputs(USAGE, stderr);
        return MEASURE_USAGE;
    }
    if (!measure_number("RANKS", argv[3], 2, 1 << 24, &ranks) ||
        !measure_number("COUNT", argv[4], 1, 100000000, &count)) {
        return MEASURE_USAGE;
    }
    if (!mpi_load(&session.mpi, open_mpi)) {
        return MEASURE_MISSING;
    }
    if (session.mpi.init(&argc, &argv) != 0) {
        measure_complain(0, "MPI_Init failed");
        return MEASURE_FAILED;
    }
    must(&session, session.mpi.rank(session.mpi.world, &session.rank), "MPI_Comm_rank failed");
    must(&session, session.mpi.size(session.mpi.world, &session.size), "MPI_Comm_size failed");
    introduce(&session);
    if (session.size != ranks) {
        measure_complain(0,
                         "MPI started with %d ranks instead of %ld: this MPI library does not "
                         "understand srun's --mpi",
                         session.size, ranks);
        (void)session.mpi.finalize();
        return MEASURE_FAILED;
    }
    if (ping) {
        pingpong(&session, count);
    } else {
        allreduce(&session, count);
    }
    (void)fflush(stdout);
    return session.mpi.finalize() == 0 ? MEASURE_OK : MEASURE_FAILED;
}
