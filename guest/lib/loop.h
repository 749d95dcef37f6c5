/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A poll() loop.
 *
 * poll and not epoll, because the stdin and stdout of a batch script are regular files, which epoll
 * refuses. Before each wait, each source says which events it wants. So back-pressure is a
 * condition in one place, and not an event mask that has to be kept up to date.
 */
#ifndef VHPC_LOOP_H
#define VHPC_LOOP_H

#include <poll.h>
#include <stddef.h>

struct source {
    int fd;
    /* poll events wanted now; 0 = leave this fd out of the wait */
    short (*want)(struct source *);
    void (*ready)(struct source *, short revents);
    void *owner;
    size_t slot; /* place in the loop + 1; 0 = not in one */
};

struct loop {
    struct source **source;
    struct pollfd *pfd;
    size_t count;
    size_t cap;
};

/* 0 or -ENOMEM. A source must not move in memory until it is removed. */
int loop_add(struct loop *l, struct source *s);
/* Allowed from within any ready(); does not close the fd. */
void loop_remove(struct loop *l, struct source *s);
/*
 * Wait up to timeout_ms (-1: without limit) and call the sources that are ready. No source is
 * touched after its removal, but its memory may be freed only between two calls. Returns 0 or
 * -errno of poll; EINTR counts as nothing ready.
 */
int loop_once(struct loop *l, int timeout_ms);
void loop_free(struct loop *l);

/* Milliseconds of CLOCK_MONOTONIC. */
long long now_ms(void);

#endif
