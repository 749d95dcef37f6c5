/* SPDX-License-Identifier: Apache-2.0 */
#include "loop.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

int loop_add(struct loop *l, struct source *s)
{
    if (l->count == l->cap) {
        size_t cap = l->cap > 0 ? l->cap * 2 : 16;
        struct source **source = realloc(l->source, cap * sizeof(struct source *));
        if (source == NULL)
            return -ENOMEM;
        l->source = source;
        struct pollfd *pfd = realloc(l->pfd, cap * sizeof *pfd);
        if (pfd == NULL)
            return -ENOMEM;
        l->pfd = pfd;
        l->cap = cap;
    }
    l->source[l->count++] = s;
    s->slot = l->count;
    return 0;
}

void loop_remove(struct loop *l, struct source *s)
{
    if (s->slot == 0)
        return;
    l->source[s->slot - 1] = NULL;
    s->slot = 0;
}

static void compact(struct loop *l)
{
    size_t kept = 0;
    for (size_t i = 0; i < l->count; i++) {
        struct source *s = l->source[i];
        if (s == NULL)
            continue;
        l->source[kept++] = s;
        s->slot = kept;
    }
    l->count = kept;
}

int loop_once(struct loop *l, int timeout_ms)
{
    compact(l);
    size_t count = l->count;
    for (size_t i = 0; i < count; i++) {
        struct source *s = l->source[i];
        short events = s->want(s);
        /* With events 0 poll would still report POLLHUP and POLLERR, and spin. */
        l->pfd[i] = (struct pollfd){.fd = events != 0 ? s->fd : -1, .events = events};
    }
    int ready = poll(l->pfd, (nfds_t)count, timeout_ms);
    if (ready < 0)
        return errno == EINTR ? 0 : -errno;
    for (size_t i = 0; i < count && ready > 0; i++) {
        short revents = l->pfd[i].revents;
        if (revents == 0)
            continue;
        ready--;
        if (l->source[i] != NULL)
            l->source[i]->ready(l->source[i], revents);
    }
    return 0;
}

void loop_free(struct loop *l)
{
    free(l->source);
    free(l->pfd);
    *l = (struct loop){0};
}

long long now_ms(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (long long)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}
