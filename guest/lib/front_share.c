/* SPDX-License-Identifier: Apache-2.0 */
#include "front_share.h"

#include <errno.h>

enum { ASK_AFTER = VHPC_WINDOW };

/* Ask after the first MiB. Output to a pipe or a terminal is limited by its reader. */
static int consider(struct front_share *s, struct exchange *x, const struct frame *f)
{
    if (!s->offered || s->asked || f->type != VHPC_DATA || f->fd != RING_FD ||
        f->length < RING_MIN || !x->outlet[RING_FD].regular)
        return 0;
    s->seen += f->length;
    if (s->seen < ASK_AFTER)
        return 0;
    s->asked = true;
    x->chan->may_take = true;
    return chan_send(x->chan, &(struct frame){.type = VHPC_SHARE});
}

static int broken(struct exchange *x, const char *why)
{
    x->flow.why = why;
    return -EPROTO;
}

/* The shim has sent the memory. If it cannot be mapped, say nothing: all continues as before. */
static int answered(struct front_share *s, struct exchange *x)
{
    struct chan *c = x->chan;
    int rc = -EINVAL;
    if (!c->may_take)
        return broken(x, "an unexpected SHARE");
    c->may_take = false;
    if (c->takes.count == RING_PARTS)
        rc = ring_map(&s->ring, c->takes.fd);
    passfd_close(&c->takes);
    return rc < 0 ? 0 : chan_send(c, &(struct frame){.type = VHPC_SHARED});
}

int front_share_frame(struct front_share *s, struct exchange *x, struct frame *f)
{
    if (f->type == VHPC_SHARE)
        return answered(s, x);
    if (f->type != VHPC_SHARED) {
        int rc = consider(s, x, f);
        return rc < 0 ? rc : 1;
    }
    if (s->ring.at == NULL || f->length != 4 || f->fd != RING_FD || f->flags != 0)
        return broken(x, "a malformed or unexpected SHARED");
    uint32_t length = get_le32(f->payload);
    if (length == 0 || length > VHPC_PAYLOAD_MAX)
        return broken(x, "SHARED with an impossible length");
    f->type = VHPC_DATA;
    f->length = length;
    f->payload = ring_next(&s->ring);
    ring_advance(&s->ring, length);
    return 1;
}
