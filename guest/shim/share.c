/* SPDX-License-Identifier: Apache-2.0 */
/* Output that reaches a client through memory instead of its socket (ring.h). */
/* Decision: Large output passes through shared memory */
#include <errno.h>
#include <string.h>

#include "shim.h"

/* 64 MiB in all. Clients beyond get all bytes through their sockets. */
enum { RINGS_MAX = 64 };

int share_asked(struct client *c, const struct frame *f)
{
    struct chan *chan = &c->chan;
    struct frame answer = {.type = VHPC_SHARE};
    if (f->length != 0 || f->call != 0 || f->flags != 0 || c->ring.at != NULL)
        return chan_broken(chan, "a malformed or unexpected SHARE");
    /* Without an answer the client continues as before. */
    if (c->shim->ring_count >= RINGS_MAX || ring_make(&c->ring, chan->gives.fd) < 0)
        return 0;
    c->shim->ring_count++;
    chan->gives.count = RING_PARTS;
    return chan_send(chan, &answer);
}

int share_mapped(struct client *c, const struct frame *f)
{
    if (f->length != 0 || f->call != 0 || f->flags != 0 || c->ring.at == NULL || c->shares)
        return chan_broken(&c->chan, "a malformed or unexpected SHARED");
    c->shares = true;
    c->shim->agent.places = true;
    return 0;
}

uint8_t *share_place(struct client *c, const struct frame *f)
{
    if (f->type != VHPC_DATA || f->fd != RING_FD || f->call != 0 || f->length < RING_MIN)
        return NULL;
    /* With credit there is room: the client has written what was there before. */
    if (!c->shares || flow_room(&c->flow, FLOW_EXECUTOR, RING_FD) < f->length)
        return NULL;
    c->shim->filling = c;
    return ring_next(&c->ring);
}

int share_pass(struct client *c, const struct frame *f)
{
    uint8_t raw[4];
    if (c->ring.at == NULL || f->payload != ring_next(&c->ring))
        return chan_send(&c->chan, f);
    put_le32(raw, f->length);
    ring_advance(&c->ring, f->length);
    return chan_send(
        &c->chan,
        &(struct frame){.type = VHPC_SHARED, .fd = RING_FD, .length = sizeof raw, .payload = raw});
}

void share_end(struct client *c)
{
    struct shim *s = c->shim;
    s->ring_count -= c->ring.at != NULL;
    ring_free(&c->ring);
    s->agent.places = s->ring_count > 0;
}
