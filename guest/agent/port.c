/* SPDX-License-Identifier: Apache-2.0 */
/* The virtio-serial port: found by its name, opened when the host is connected. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "agent.h"

enum { RETRY_MS = 20 };

static bool has_name(const char *port, const char *wanted)
{
    char path[300], name[64] = "";
    (void)snprintf(path, sizeof path, "/sys/class/virtio-ports/%.200s/name", port);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, name, sizeof name - 1);
    (void)close(fd);
    if (n <= 0)
        return false;
    name[strcspn(name, "\n")] = '\0';
    return strcmp(name, wanted) == 0;
}

bool port_find(const char *name, char *path, size_t size)
{
    bool found = false;
    DIR *dir = opendir("/sys/class/virtio-ports");
    if (dir == NULL)
        return false;
    for (struct dirent *e; !found && (e = readdir(dir)) != NULL;) {
        found = e->d_name[0] != '.' && has_name(e->d_name, name);
        if (found)
            (void)snprintf(path, size, "/dev/%.200s", e->d_name);
    }
    (void)closedir(dir);
    return found;
}

/*
 * Between two attempts, handles signals and, as PID 1, reaps orphans. False: the agent has to stop.
 */
static bool pause_a_little(struct agent *a)
{
    (void)loop_once(&a->loop, RETRY_MS);
    callers_sweep(a);
    return !a->stopping;
}

int port_open(struct agent *a, const char *path)
{
    char found[256];
    int fd = -1;
    while (fd < 0) {
        if (path != NULL || port_find(VHPC_PORT_NAME, found, sizeof found))
            fd = open(path != NULL ? path : found, O_RDWR | O_NONBLOCK | O_CLOEXEC);
        if (fd < 0 && path != NULL && errno != ENOENT && errno != EBUSY)
            return -errno;
        if (fd < 0 && !pause_a_little(a))
            return -EINTR;
    }
    /*
     * While the host's side is not connected, poll reports POLLHUP at once and QEMU discards what
     * is written: a HELLO would be lost.
     */
    for (;;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (poll(&p, 1, 0) >= 0 && (p.revents & (POLLHUP | POLLERR | POLLNVAL)) == 0)
            return fd;
        if (!pause_a_little(a)) {
            (void)close(fd);
            return -EINTR;
        }
    }
}
