/* SPDX-License-Identifier: Apache-2.0 */
#include "localfd.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

void localfd_release(int fd, enum localfd kind, int how)
{
    if (kind == LOCALFD_SOCKET)
        (void)shutdown(fd, how);
    if (kind != LOCALFD_SHARED) {
        (void)close(fd);
        return;
    }
    if (fd == STDERR_FILENO)
        return;
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0)
        return;
    (void)dup2(null, fd);
    (void)close(null);
}

bool localfd_writable(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLOUT};
    return poll(&p, 1, 0) == 1 && (p.revents & (POLLOUT | POLLERR | POLLHUP)) != 0;
}

bool localfd_hung_up(int fd)
{
    struct pollfd p = {.fd = fd};
    return poll(&p, 1, 0) == 1 && (p.revents & POLLHUP) != 0;
}
