/* SPDX-License-Identifier: Apache-2.0 */
/* The guest's side: each frame is checked before a client gets it. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "shim.h"

static int on_hello(struct shim *s, const struct frame *f)
{
    struct hello h;
    if (hello_parse(f, &h) < 0)
        return chan_broken(&s->agent, "a malformed HELLO");
    h.state = VHPC_STATE_UP;
    if (s->agent_up) {
        /*
         * The agent sends HELLO when its port opens and as the answer to ours: both must be the
         * same, or it is another agent.
         */
        bool same = strcmp(h.boot_id, s->agent_hello.boot_id) == 0 &&
                    strcmp(h.agent_version, s->agent_hello.agent_version) == 0;
        return same ? 0 : chan_broken(&s->agent, "the guest was rebooted");
    }
    if (hello_version(&h) == 0)
        return chan_broken(&s->agent, "no protocol version in common with the image's agent");
    s->agent_hello = h;
    s->agent_up = true;
    for (struct client *c = s->clients; c != NULL; c = c->next)
        client_greet(c);
    return 0;
}

static int on_reply(struct shim *s, struct client *c, const struct frame *f)
{
    if (f->call != 0 || c->requests_pending == 0 || (f->flags & VHPC_READER) ||
        f->length > VHPC_MESSAGE_MAX - c->reply_len)
        return chan_broken(&s->agent, "a REPLY without a REQUEST, or one that is too long");
    c->reply_len += f->length;
    if ((f->flags & VHPC_MORE) == 0) {
        c->reply_len = 0;
        c->requests_pending--;
    } else if (f->length == 0) {
        return chan_broken(&s->agent, "an empty part of a REPLY");
    }
    return 1;
}

static struct host_call *begin_call(struct client *c, const struct frame *f)
{
    struct host_call *call = client_call(c, 0);
    if (call == NULL || f->type != VHPC_EXEC || c->flow.phase != FLOW_RUNNING)
        return NULL;
    *call = (struct host_call){.id = f->call};
    c->last_call = f->call;
    return call;
}

static int on_host_call(struct shim *s, struct client *c, const struct frame *f)
{
    struct host_call *call = client_call(c, f->call);
    if (call == NULL && f->call <= c->last_call)
        return 0; /* the host's side has ended the call; this frame was already on its way */
    if (call == NULL)
        call = begin_call(c, f);
    if (call == NULL)
        return chan_broken(&s->agent, "a host call that is not allowed now");
    switch (flow_check(&call->flow, FLOW_INITIATOR, f)) {
    case FLOW_DROP:
        return 0;
    case FLOW_BROKEN:
        return chan_broken(&s->agent, call->flow.why);
    case FLOW_PASS:
        break;
    }
    if (flow_over(&call->flow))
        call->id = 0;
    return 1;
}

static int on_command(struct shim *s, struct client *c, const struct frame *f)
{
    switch (flow_check(&c->flow, FLOW_EXECUTOR, f)) {
    case FLOW_DROP:
        return 0;
    case FLOW_BROKEN:
        return chan_broken(&s->agent, c->flow.why);
    case FLOW_PASS:
        break;
    }
    return 1;
}

/* 1: pass it on, 0: ignore it, <0: a violation by the guest. */
static int judge(struct shim *s, struct client *c, const struct frame *f)
{
    switch (f->type) {
    case VHPC_REPLY:
        return on_reply(s, c, f);
    case VHPC_PONG:
        if (c->pings_pending == 0 || f->call != 0 || f->length > 64 || f->flags != 0)
            return chan_broken(&s->agent, "a PONG without a PING");
        c->pings_pending--;
        return 1;
    case VHPC_HELLO:
    case VHPC_REQUEST:
    case VHPC_PING:
        return chan_broken(&s->agent, "a request from the guest");
    default:
        return f->call == 0 ? on_command(s, c, f) : on_host_call(s, c, f);
    }
}

static uint8_t *place_for(struct chan *chan, const struct frame *f)
{
    struct client *c = client_find(chan->owner, f->session);
    return c != NULL ? share_place(c, f) : NULL;
}

static int on_frame(struct chan *chan, const struct frame *f)
{
    struct shim *s = chan->owner;
    struct frame out = *f;
    s->filling = NULL;
    if (f->type == VHPC_HELLO && f->session == 0)
        return on_hello(s, f);
    /* A restored guest may have been stopped just before it answered its last host. */
    if (!s->agent_up && (f->type == VHPC_REPLY || f->type == VHPC_PONG))
        return 0;
    if (!s->agent_up || f->session == 0)
        return chan_broken(chan, "a frame without a session");
    struct client *c = client_find(s, f->session);
    if (c == NULL)
        return f->session < s->next_session ? 0 : chan_broken(chan, "an unknown session");
    if (c->chan.finishing)
        return 0;
    int rc = judge(s, c, f);
    if (rc <= 0)
        return rc;
    out.session = 0;
    if (share_pass(c, &out) < 0)
        client_drop(c, "it does not read the data that waits for it");
    return 0;
}

static void on_close(struct chan *chan, int error)
{
    struct shim *s = chan->owner;
    if (error == -EPROTO)
        shim_end(s, SHIM_AGENT_BROKEN, chan->why != NULL ? chan->why : "a malformed message");
    else
        shim_lose(s);
}

int shim_agent_open(struct shim *s, int fd)
{
    struct hello h;
    int rc = fd_prepare(fd);
    if (rc == 0)
        rc = chan_open(&s->agent, &s->loop, fd);
    if (rc < 0)
        return rc;
    s->agent.on_frame = on_frame;
    s->agent.on_close = on_close;
    s->agent.place_for = place_for;
    s->agent.owner = s;
    hello_init(&h);
    return hello_send(&s->agent, &h);
}
