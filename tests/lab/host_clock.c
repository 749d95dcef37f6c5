/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The wall clock of one lab host. All hosts are namespaces on one kernel, and no namespace has a
 * wall clock of its own. So every program of a host has this library from /etc/ld.so.preload: to
 * what the kernel says it adds the seconds in a file, a number of 64 bits that programs have
 * mapped. A change of the file is a step of the clock for all programs of the host at once, also
 * for those that run.
 *
 * Monotonic clocks are the kernel's, as they are when a real clock is set. Not as with a real
 * clock: files keep the kernel's times, and a wait until a time of the wall clock that has begun
 * before a step keeps its length.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define FILE_OF_STEP "/etc/host-clock"
// x86-64's version of condition variables as they are since 2003
#define OF_CONDITIONS "GLIBC_2.3.2"

static volatile const int64_t no_step = 0;
static volatile const int64_t *step = &no_step;

__attribute__((constructor)) static void map_step(void)
{
    const int saved = errno;
    const int fd = open(FILE_OF_STEP, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        void *found = mmap(NULL, sizeof *step, PROT_READ, MAP_SHARED, fd, 0);
        if (found != MAP_FAILED)
            step = found;
        close(fd);
    }
    errno = saved;
}

static int is_wall(clockid_t clock)
{
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    const int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && is_wall(clock))
        now->tv_sec += *step;
    return failed;
}

int timespec_get(struct timespec *now, int base)
{
    return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, now) ? base : 0;
}

time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    (void)zone;
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    *now = (struct timeval){.tv_sec = exact.tv_sec, .tv_usec = exact.tv_nsec / 1000};
    return 0;
}

// The same moment by the kernel's clock; a time of a monotonic clock, which is small, stays as it
// is.
static struct timespec by_kernel(const struct timespec *until)
{
    const time_t since_2001 = 1000000000;
    struct timespec found = *until;
    if (found.tv_sec > since_2001)
        found.tv_sec -= *step;
    return found;
}

static void *original(const char *name, const char *version)
{
    void *found = version ? dlvsym(RTLD_NEXT, name, version) : NULL;
    if (!found)
        found = dlsym(RTLD_NEXT, name);
    if (!found)
        abort();
    return found;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until)
{
    static int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!wait)
        *(void **)&wait = original("pthread_cond_timedwait", OF_CONDITIONS);
    const struct timespec end = by_kernel(until);
    return wait(condition, mutex, &end);
}

int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           clockid_t clock, const struct timespec *restrict until)
{
    static int (*wait)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!wait)
        *(void **)&wait = original("pthread_cond_clockwait", NULL);
    const struct timespec end = by_kernel(until);
    return wait(condition, mutex, clock, &end);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until)
{
    static int (*lock)(pthread_mutex_t *, const struct timespec *);
    if (!lock)
        *(void **)&lock = original("pthread_mutex_timedlock", NULL);
    const struct timespec end = by_kernel(until);
    return lock(mutex, &end);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until)
{
    static int (*wait)(sem_t *, const struct timespec *);
    if (!wait)
        *(void **)&wait = original("sem_timedwait", NULL);
    const struct timespec end = by_kernel(until);
    return wait(semaphore, &end);
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict until)
{
    static int (*wait)(sem_t *, clockid_t, const struct timespec *);
    if (!wait)
        *(void **)&wait = original("sem_clockwait", NULL);
    const struct timespec end = by_kernel(until);
    return wait(semaphore, clock, &end);
}
