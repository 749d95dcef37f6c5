/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of the queues of all clients of a shim. */
#include "shim.h"

/* For all queues together: a stalled stdout of 256 tasks. */
enum { CLIENTS_LIMIT = 256 << 20 };

static size_t memory_of(const struct client *c)
{
    return c->chan.closed ? 0 : c->chan.in.cap + c->chan.out.cap;
}

/* Frees what nothing waits in: each client that has sent a frame keeps room for the largest one. */
static void free_empty(struct shim *s)
{
    for (struct client *c = s->clients; c != NULL; c = c->next) {
        if (c->chan.in.len == 0)
            buf_free(&c->chan.in);
        if (c->chan.out.len == 0)
            buf_free(&c->chan.out);
    }
}

/* All clients share a limit: the one that uses most memory is dropped. */
void shim_limit_memory(struct shim *s)
{
    for (bool freed = false;;) {
        size_t total = 0;
        struct client *largest = s->clients;
        for (struct client *c = s->clients; c != NULL; c = c->next) {
            total += memory_of(c);
            if (memory_of(c) > memory_of(largest))
                largest = c;
        }
        if (total <= CLIENTS_LIMIT)
            return;
        if (!freed) {
            free_empty(s);
            freed = true;
            continue;
        }
        client_drop(largest, "the clients of this guest do not read the data that waits for them, "
                             "and most of it waits for this one");
    }
}
