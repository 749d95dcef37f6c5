/* SPDX-License-Identifier: Apache-2.0 */
#include "triad.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "measure.h"

#define CPUS_MAX 8192
#define BYTES_PER_ELEMENT 24.0 /* two loads and one store of 8 bytes, as STREAM counts */

static const double SCALE = 3.0;

/* Started threads wait at the gate: with one barrier for all of them, a failed pthread_create would
 * leave the others in it without end. */
struct team {
    pthread_barrier_t barrier;
    pthread_mutex_t gate;
    bool give_up; /* written before the gate opens */
    size_t elements;
    long rounds;
    double *seconds; /* of each round */
};

struct member {
    struct team *team;
    int number;
    int cpu;
    int error;  /* errno of what failed, 0: nothing */
    bool wrong; /* the result is not what arithmetic gives */
    pthread_t thread;
};

static double *array(size_t elements)
{
    void *memory = mmap(NULL, elements * sizeof(double), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void once(double *restrict a, const double *restrict b, const double *restrict c,
                 size_t elements)
{
    for (size_t i = 0; i < elements; i++) {
        a[i] = b[i] + SCALE * c[i];
    }
    __asm__ volatile(""
                     :
                     : "r"(a)
                     : "memory"); /* the compiler must not drop a round whose result is unused */
}

static bool right(const double *a, size_t elements)
{
    for (size_t i = 0; i < elements; i++) {
        if (fabs(a[i] - (2.0 + SCALE)) > 1e-12) {
            return false;
        }
    }
    return true;
}

/* Arrays are filled by the thread that uses them, so that their pages are on its NUMA node. */
static void *work(void *argument)
{
    struct member *member = argument;
    struct team *team = member->team;
    (void)pthread_mutex_lock(&team->gate);
    bool give_up = team->give_up;
    (void)pthread_mutex_unlock(&team->gate);
    if (give_up) {
        return NULL;
    }
    cpu_set_t *set = CPU_ALLOC(CPUS_MAX);
    size_t size = CPU_ALLOC_SIZE(CPUS_MAX);
    double *a = array(team->elements);
    double *b = array(team->elements);
    double *c = array(team->elements);
    if (set == NULL || a == NULL || b == NULL || c == NULL) {
        member->error = ENOMEM;
    } else {
        CPU_ZERO_S(size, set);
        CPU_SET_S((size_t)member->cpu, size, set);
        member->error = pthread_setaffinity_np(pthread_self(), size, set);
        for (size_t i = 0; i < team->elements; i++) {
            a[i] = 0.0;
            b[i] = 2.0;
            c[i] = 1.0;
        }
    }
    bool able = member->error == 0;
    for (long round = 0; round < team->rounds; round++) {
        (void)pthread_barrier_wait(&team->barrier);
        double start = measure_now();
        if (able) {
            once(a, b, c, team->elements);
        }
        (void)pthread_barrier_wait(&team->barrier);
        if (member->number == 0) {
            team->seconds[round] = measure_now() - start;
        }
    }
    member->wrong = able && !right(a, team->elements);
    CPU_FREE(set);
    return NULL;
}

/* CPUs of this process's affinity mask; returns their number, 0 on an error. */
static int own_cpus(int *cpus)
{
    cpu_set_t *set = CPU_ALLOC(CPUS_MAX);
    size_t size = CPU_ALLOC_SIZE(CPUS_MAX);
    int count = 0;
    if (set != NULL && sched_getaffinity(0, size, set) == 0) {
        for (int cpu = 0; cpu < CPUS_MAX; cpu++) {
            if (CPU_ISSET_S((size_t)cpu, size, set)) {
                cpus[count++] = cpu;
            }
        }
    }
    CPU_FREE(set);
    return count;
}

static long available_mib(void)
{
    FILE *file = fopen("/proc/meminfo", "re");
    char line[128];
    long found = -1;
    while (file != NULL && found < 0 && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, "MemAvailable:", 13) == 0) {
            found = strtol(line + 13, NULL, 10) / 1024;
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return found;
}

/* Start all members, let them run, and wait for them; returns errno of a thread that did not
 * start. */
static int run_all(struct team *team, struct member *members, int count)
{
    int started = 0;
    int error = 0;
    (void)pthread_mutex_lock(&team->gate);
    while (started < count && error == 0) {
        error = pthread_create(&members[started].thread, NULL, work, &members[started]);
        started += error == 0;
    }
    team->give_up = error != 0;
    (void)pthread_mutex_unlock(&team->gate);
    for (int i = 0; i < started; i++) {
        (void)pthread_join(members[i].thread, NULL);
    }
    return error;
}

static int report(const struct team *team, const struct member *members, int count, long mib)
{
    for (int i = 0; i < count; i++) {
        if (members[i].error != 0) {
            measure_complain(members[i].error, "thread on CPU %d", members[i].cpu);
            return MEASURE_FAILED;
        }
        if (members[i].wrong) {
            measure_complain(0, "CPU %d has computed a wrong result", members[i].cpu);
            return MEASURE_FAILED;
        }
    }
    double best = team->seconds[0];
    for (long round = 1; round < team->rounds; round++) {
        best = team->seconds[round] < best ? team->seconds[round] : best;
    }
    double bytes = BYTES_PER_ELEMENT * (double)team->elements * count;
    printf("threads %d\narray_mib %ld\ntriad_mb_s %.1f\n", count, mib * count, bytes / best / 1e6);
    return MEASURE_OK;
}

int triad(long mib, long rounds)
{
    static int cpus[CPUS_MAX];
    int count = own_cpus(cpus);
    long needed = 3 * mib * count;
    long available = available_mib();
    if (count == 0) {
        measure_complain(errno, "cannot read the affinity mask");
        return MEASURE_FAILED;
    }
    if (available >= 0 && needed > available) {
        measure_complain(0, "%d threads need %ld MiB of memory, %ld MiB are available", count,
                         needed, available);
        return MEASURE_FAILED;
    }
    struct team team = {.elements = (size_t)mib * 1024 * 1024 / sizeof(double), .rounds = rounds};
    struct member *members = calloc((size_t)count, sizeof *members);
    team.seconds = calloc((size_t)rounds, sizeof *team.seconds);
    int result = MEASURE_FAILED;
    int error = members == NULL || team.seconds == NULL ? ENOMEM : 0;
    if (error == 0) {
        (void)pthread_barrier_init(&team.barrier, NULL, (unsigned)count);
        (void)pthread_mutex_init(&team.gate, NULL);
        for (int i = 0; i < count; i++) {
            members[i] = (struct member){.team = &team, .number = i, .cpu = cpus[i]};
        }
        error = run_all(&team, members, count);
    }
    if (error != 0) {
        measure_complain(error, "cannot start %d threads", count);
    } else {
        result = report(&team, members, count, mib);
    }
    free(members);
    free(team.seconds);
    return result;
}
