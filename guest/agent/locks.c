/* SPDX-License-Identifier: Apache-2.0 */
#include "locks.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent.h"
#include "broker.h"
#include "child.h"
#include "filter.h"
#include "passfd.h"

/* Wait for the descriptor of the reports; -errno: there is none. */
static int receive(int from)
{
    char byte;
    struct passed got = {0};
    ssize_t n = passfd_read(from, &byte, 1, &got);
    return n == 1 && got.count == 1 ? got.fd[0] : -EPIPE;
}

_Noreturn static void serve(int port, const char *path, int from, pid_t parent)
{
    enum { PORT = 3, FROM };
    if (dup2(from, FROM + 2) < 0 || dup2(port, PORT + 2) < 0 || dup2(PORT + 2, PORT) < 0 ||
        dup2(FROM + 2, FROM) < 0)
        _exit(1);
    (void)prctl(PR_SET_NAME, "vhpc-locks", 0, 0, 0);
    int reports = child_shed(FROM + 1, parent) ? receive(FROM) : -EPIPE;
    _exit(reports < 0 ? 1 : broker_run(PORT, path, reports));
}

/* The process, or -errno. */
static pid_t start(int port, const char *path)
{
    int end[2];
    struct passed reports = {.count = 1};
    pid_t parent = getpid();
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, end) < 0)
        return -errno;
    pid_t pid = fork();
    if (pid == 0)
        serve(port, path, end[1], parent);
    int rc = pid < 0 ? -errno : 0;
    reports.fd[0] = rc == 0 ? filter_install() : -1;
    if (rc == 0 && reports.fd[0] < 0)
        rc = reports.fd[0];
    if (rc == 0 && passfd_write(end[0], "", 1, &reports) != 1)
        rc = -errno;
    passfd_close(&reports);
    (void)close(end[0]); /* without a descriptor the process ends */
    (void)close(end[1]);
    return rc < 0 ? rc : pid;
}

void locks_start(struct agent *a)
{
    char path[256];
    if (!port_find(LOCKS_PORT_NAME, path, sizeof path))
        return;
    int port = open(path, O_RDWR | O_CLOEXEC);
    pid_t rc = port < 0 ? -errno : start(port, path);
    if (port >= 0)
        (void)close(port);
    a->locks = rc > 0 ? rc : 0;
    if (rc < 0)
        (void)fprintf(stderr, "vhpc-agent: file locks apply within this guest only: %s\n",
                      rc == -ENOSYS ? "its kernel is older than 5.5" : strerror(-rc));
}

void locks_new_host(const struct agent *a)
{
    if (a->locks > 0)
        (void)kill(a->locks, SIGUSR1);
}

void locks_reaped(struct agent *a, pid_t pid)
{
    if (pid != a->locks || pid <= 0)
        return;
    a->locks = 0;
    (void)fprintf(stderr, "vhpc-agent: vhpc-locks has ended: no program gets a lock any more\n");
}
