/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors that travel with the bytes of a unix socket (unix(7), SCM_RIGHTS). */
#ifndef VHPC_PASSFD_H
#define VHPC_PASSFD_H

#include <stddef.h>
#include <sys/types.h>

enum { PASSFD_MAX = 4 };

struct passed {
    int fd[PASSFD_MAX];
    size_t count;
};

/* As write(), with the descriptors, which stay open here. */
ssize_t passfd_write(int socket, const void *data, size_t len, const struct passed *fds);
/*
 * As read(). Descriptors that come with the bytes replace those in *fds; they have FD_CLOEXEC. More
 * than PASSFD_MAX are closed by the kernel.
 */
ssize_t passfd_read(int socket, void *to, size_t len, struct passed *fds);
/* Close all of them. */
void passfd_close(struct passed *fds);

#endif
