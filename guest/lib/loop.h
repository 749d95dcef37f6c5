/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A poll() loop.
 *
 * poll and not epoll because a batch script's stdin and stdout are regular
 * files, which epoll refuses. Each source says before every wait what it wants
 * to hear, so back-pressure is a condition written in one place and never an
 * event mask that somebody forgot to restore.
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

/* 0 or -ENOMEM. A source must stay where it is until it was removed. */
int loop_add(struct loop *l, struct source *s);
/* Safe from within any ready(); does not close the fd. */
void loop_remove(struct loop *l, struct source *s);
/*
 * Wait up to timeout_ms (-1: for ever) and call what is ready. No source is
 * touched after its removal, but the memory of one may be freed only between
 * two calls. Returns 0 or -errno of poll; EINTR counts as nothing ready.
 */
int loop_once(struct loop *l, int timeout_ms);
void loop_free(struct loop *l);

/* Milliseconds of CLOCK_MONOTONIC. */
long long now_ms(void);

#endif
