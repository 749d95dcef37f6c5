/* SPDX-License-Identifier: Apache-2.0 */
/* Frames from the host. The shim has checked them, and the agent checks them again. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "agent.h"
#include "hold.h"
#include "link.h"

static int on_request(struct agent *a, const struct frame *f)
{
    struct session *s = session_find(a, f->session);
    if (s == NULL)
        s = session_add(a, f->session);
    if (s == NULL)
        return -ENOMEM;
    int rc = message_add(&s->request, f);
    if (rc != 1)
        return rc;
    rc = control_request(s, &s->request.data);
    message_reset(&s->request);
    return rc;
}

static int on_command(struct agent *a, const struct frame *f)
{
    struct session *s = session_find(a, f->session);
    if (f->type == VHPC_CLOSE) {
        if (s != NULL)
            session_close(s);
        return 0;
    }
    if (s != NULL && f->type != VHPC_SIGNAL)
        session_heard(s);
    if (s == NULL && f->type == VHPC_EXEC) {
        s = session_add(a, f->session);
        if (s == NULL)
            return error_send(&a->host, f->session, 0, VHPC_ERR_INTERNAL, EAGAIN,
                              "the guest runs too many programs");
    }
    return s != NULL ? session_exec(s, f) : 0;
}

static int on_frame(struct chan *c, const struct frame *f)
{
    struct agent *a = c->owner;
    struct frame out = *f;
    struct hello peer;
    struct session *s;
    if (f->type == VHPC_HELLO) {
        if (hello_parse(f, &peer) < 0 || hello_version(&peer) == 0)
            return chan_broken(c, "no protocol version in common");
        /* A restored guest does not see its port close: the new host begins with a HELLO. */
        if (a->hold.phase == HOLD_HELD)
            hold_new_host(a);
        return hello_send(c, &a->hello);
    }
    if (f->session == 0)
        return chan_broken(c, "a frame without a session");
    switch (f->type) {
    case VHPC_PING:
        if ((s = session_find(a, f->session)) != NULL)
            session_heard(s);
        out.type = VHPC_PONG;
        return chan_send(c, &out);
    case VHPC_REQUEST:
        return on_request(a, f);
    case VHPC_REPLY:
    case VHPC_PONG:
        return chan_broken(c, "an answer without a request");
    default:
        break;
    }
    if (f->call == 0)
        return on_command(a, f);
    s = session_find(a, f->session);
    int rc = s != NULL ? link_frame(s, f) : 0;
    return rc == 1 ? caller_frame(s, f) : rc;
}

static void on_close(struct chan *c, int error)
{
    struct agent *a = c->owner;
    if (error == -EPROTO)
        (void)fprintf(stderr, "vhpc-agent: protocol violation by the host: %s\n",
                      c->why != NULL ? c->why : "malformed message");
    hold_new_host(a);
    a->host_open = false;
}

/* The shim always reads, so if the queue is long the shim has ended or is slow: read no more. */
static bool may_read(struct chan *c)
{
    return chan_queued(c) < (16u << 20);
}

int host_open(struct agent *a, int fd, bool port)
{
    chan_release(&a->host); /* of an earlier host */
    a->host = (struct chan){.port = port,
                            .moves_pages = port && is_emulated(),
                            .on_frame = on_frame,
                            .on_close = on_close,
                            .may_read = may_read,
                            .owner = a};
    int rc = fd_prepare(fd);
    if (rc == 0)
        rc = chan_open(&a->host, &a->loop, fd);
    if (rc < 0)
        return rc;
    a->host_open = true;
    return hello_send(&a->host, &a->hello);
}
