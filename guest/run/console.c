/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `srun vhpc-console GUEST [follow]`: prints what a guest of the job on this node wrote to its
 * console. The task runs here and not in the guest: only the host has the console's file, which the
 * job's user may read.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "run.h"

enum { PIECE = 65536, POLL_MS = 200, GUEST_MAX = 9999, EXIT_ARGUMENTS = 64 };

static bool write_all(const char *data, size_t length)
{
    while (length > 0) {
        ssize_t n = write(STDOUT_FILENO, data, length);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        data += n;
        length -= (size_t)n;
    }
    return true;
}

/*
 * Print what follows *at. The shim punches a hole into the middle of a long console, which is
 * skipped. 1 if there was something, 0 at the end, -1 on failure.
 */
static int print_next(int fd, off_t *at)
{
    static char piece[PIECE];
    struct stat st;
    if (fstat(fd, &st) < 0)
        return -1;
    if (st.st_size < *at)
        *at = st.st_size; /* without holes, the shim cuts the file */
    off_t begin = lseek(fd, *at, SEEK_DATA);
    if (begin < 0)
        return errno == ENXIO ? 0 : -1;
    off_t end = lseek(fd, begin, SEEK_HOLE);
    if (end < 0)
        return -1;
    if (begin > *at) {
        char left_out[64];
        int length = snprintf(left_out, sizeof left_out, "\n[%lld bytes left out]\n",
                              (long long)(begin - *at));
        if (!write_all(left_out, (size_t)length))
            return -1;
    }
    off_t rest = end - begin;
    ssize_t n = pread(fd, piece, rest < PIECE ? (size_t)rest : PIECE, begin);
    if (n < 0)
        return -1;
    *at = begin + n;
    return n == 0 ? 0 : write_all(piece, (size_t)n) ? 1 : -1;
}

/* Until the job's Epilog removes the file; 0, or -1 with errno. */
static int print_all(int fd, bool follow)
{
    const struct timespec pause = {.tv_nsec = POLL_MS * 1000000L};
    struct stat st;
    off_t at = 0;
    for (;;) {
        int rc = print_next(fd, &at);
        if (rc > 0)
            continue;
        if (rc < 0 || !follow)
            return rc;
        if (fstat(fd, &st) < 0)
            return -1;
        if (st.st_nlink == 0)
            return 0;
        (void)nanosleep(&pause, NULL);
    }
}

/* The socket is RUN-FOLDER/gN/run.sock, the console RUN-FOLDER/gM/console.log. */
static bool find_console(const char *socket, unsigned long guest, char path[PATH_MAX])
{
    const char *name = strrchr(socket, '/');
    const char *folder = name;
    if (name == NULL)
        return false;
    while (folder > socket && folder[-1] != '/')
        folder--;
    int length =
        snprintf(path, PATH_MAX, "%.*sg%lu/console.log", (int)(folder - socket), socket, guest);
    return length > 0 && length < PATH_MAX;
}

int run_console(const struct run_options *o)
{
    char path[PATH_MAX];
    char *rest = NULL;
    bool follow = o->argc == 3 && strcmp(o->argv[2], "follow") == 0;
    if (strcmp(o->argv[0], "vhpc-console") != 0)
        return -1;
    errno = 0;
    unsigned long guest = o->argc > 1 && o->argv[1][0] >= '0' && o->argv[1][0] <= '9'
                              ? strtoul(o->argv[1], &rest, 10)
                              : ULONG_MAX;
    if (rest == NULL || *rest != '\0' || errno != 0 || guest > GUEST_MAX ||
        (o->argc > 2 && !follow)) {
        (void)fputs("usage: vhpc-console GUEST [follow]\n", stderr);
        return EXIT_ARGUMENTS;
    }
    if (!find_console(o->socket, guest, path)) {
        (void)fprintf(stderr, "vhpc: couldn't find the consoles of this job: odd socket %s\n",
                      o->socket);
        return EXIT_FAILURE;
    }
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    int rc = fd < 0 ? -1 : print_all(fd, follow);
    if (rc < 0)
        (void)fprintf(stderr, "vhpc: couldn't read the console of guest %lu: %s: %s\n", guest, path,
                      strerror(errno));
    if (fd >= 0)
        (void)close(fd);
    return rc < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
