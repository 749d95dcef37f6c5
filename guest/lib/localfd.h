/* SPDX-License-Identifier: Apache-2.0 */
/* This process's fds at the ends of relayed streams. */
#ifndef VHPC_LOCALFD_H
#define VHPC_LOCALFD_H

#include <stdbool.h>

/* The handling of an fd at the end of its stream. */
enum localfd {
    LOCALFD_OWN,    /* it is closed */
    LOCALFD_SHARED, /* our own stdio: it stays open, and is not made non-blocking */
    LOCALFD_SOCKET, /* one direction of a socket: this direction is shut down, then it is closed */
};

/*
 * Stop using an fd for reading (SHUT_RD) or for writing (SHUT_WR). Of our own stdio, stderr stays
 * open for our messages, and the others become /dev/null: so the process at the other end of a pipe
 * sees what it would see if the program had closed its end.
 */
void localfd_release(int fd, enum localfd kind, int how);
/* Whether a blocking write of PIPE_BUF bytes would return at once. */
bool localfd_writable(int fd);
/* Whether the other end of a socket is closed, and not only one direction of it. */
bool localfd_hung_up(int fd);

#endif
