/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Command clients of this guest (srun and the like, see command.c) and their host calls. A client
 * is checked here, before its frames go to the host: for the shim, a violation by one process would
 * be a violation by the whole guest.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "again.h"

enum { CALLER_OUT_LIMIT = 4 << 20, CALLERS_MAX = 512 };

static void refuse(struct caller *c, int number, const char *text)
{
    (void)error_send(&c->chan, 0, 0, VHPC_ERR_REFUSED, number, text);
    chan_finish(&c->chan);
}

uint32_t calls_alive(const struct session *s)
{
    uint32_t count = s->links;
    for (const struct caller *c = s->agent->callers; c != NULL; c = c->next)
        count += c->session == s->number && caller_is_alive(c) ? 1 : 0;
    return count;
}

/* The client has closed its connection: close its command on the host. */
static void cancel(struct caller *c)
{
    const struct session *s = session_numbered(c->agent, c->session);
    if (s == NULL || c->call == 0 || flow_over(&c->flow) || !c->agent->host_open || again_left(c))
        return;
    struct frame f = {.type = VHPC_CLOSE, .session = s->id, .call = c->call};
    (void)flow_check(&c->flow, FLOW_INITIATOR, &f);
    (void)chan_send(&c->agent->host, &f);
}

static int on_hello(struct caller *c, const struct frame *f)
{
    struct hello h;
    if (c->said_hello || hello_parse(f, &h) < 0 || hello_version(&h) == 0)
        return -EPROTO;
    c->said_hello = true;
    return hello_send(&c->chan, &c->agent->hello);
}

/* The session, if it can have one more call; NULL if the client was refused. */
static struct session *admit(struct caller *c)
{
    struct session *s = session_numbered(c->agent, c->session);
    if (s == NULL || !s->started || s->task.exchange.flow.phase != FLOW_RUNNING) {
        refuse(
            c, ESRCH,
            "this program was not started by a Slurm job, so nothing can run on the host for it");
        return NULL;
    }
    if (calls_alive(s) >= VHPC_CALLS_MAX || s->last_call == UINT32_MAX) {
        refuse(c, EAGAIN, "too many host commands at once in this step");
        return NULL;
    }
    return s;
}

static int on_frame(struct chan *chan, const struct frame *f)
{
    struct caller *c = chan->owner;
    struct frame out = *f;
    if (f->session != 0 || f->call != 0)
        return -EPROTO;
    if (f->type == VHPC_HELLO)
        return on_hello(c, f);
    if (!c->said_hello)
        return -EPROTO;
    switch (flow_check(&c->flow, FLOW_INITIATOR, f)) {
    case FLOW_DROP:
        return 0;
    case FLOW_BROKEN:
        return -EPROTO;
    case FLOW_PASS:
        break;
    }
    if (c->call == 0) {
        struct session *for_it = f->type == VHPC_EXEC ? admit(c) : NULL;
        if (for_it == NULL)
            return f->type == VHPC_EXEC ? 0 : -EPROTO;
        c->call = ++for_it->last_call;
    }
    const struct session *s = session_numbered(c->agent, c->session);
    if (s == NULL)
        return -EPROTO; /* it has ended, and this client is about to be closed */
    if (f->type == VHPC_EXEC) {
        int rc = message_add(&c->message, f);
        return rc == 1 ? again_first(c, s) : rc;
    }
    if (again_from_client(c, f) == 0)
        return 0;
    out.session = s->id;
    out.call = c->call;
    return chan_send(&c->agent->host, &out);
}

static void on_close(struct chan *chan, int error)
{
    (void)error;
    cancel(chan->owner);
}

static bool may_read(struct chan *chan)
{
    const struct caller *c = chan->owner;
    bool begins = c->call == 0;
    return chan_queued(&c->agent->host) < CHAN_HIGH && !(begins && hold_is_quiet(c->agent)) &&
           c->agent->hold.phase < HOLD_FREEZING;
}

static short listener_want(struct source *s)
{
    (void)s;
    return POLLIN;
}

static void listener_ready(struct source *source, short revents)
{
    struct agent *a = source->owner;
    struct ucred peer;
    socklen_t len = sizeof peer;
    size_t count = 0;
    (void)revents;
    int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return;
    for (const struct caller *c = a->callers; c != NULL; c = c->next)
        count++;
    struct caller *c = count < CALLERS_MAX ? calloc(1, sizeof *c) : NULL;
    if (c == NULL || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) < 0 ||
        chan_open(&c->chan, &a->loop, fd) < 0) {
        free(c);
        (void)close(fd);
        return;
    }
    c->agent = a;
    c->session = cgroup_session_of(a, peer.pid);
    c->pid = peer.pid;
    c->chan.out_limit = CALLER_OUT_LIMIT;
    c->chan.on_frame = on_frame;
    c->chan.on_close = on_close;
    c->chan.may_read = may_read;
    c->chan.owner = c;
    c->next = a->callers;
    a->callers = c;
}

int callers_listen(struct agent *a)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    if (strlen(a->call_socket) >= sizeof at.sun_path)
        return -ENAMETOOLONG;
    memcpy(at.sun_path, a->call_socket, strlen(a->call_socket));
    if (a->system)
        (void)mkdir("/run/vhpc", 0755);
    (void)unlink(a->call_socket);
    a->listener = (struct source){.want = listener_want, .ready = listener_ready, .owner = a};
    a->listener.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (a->listener.fd < 0)
        return -errno;
    /* Any process of the guest may connect; its session decides what it may do. */
    if (bind(a->listener.fd, (struct sockaddr *)&at, sizeof at) < 0 ||
        chmod(a->call_socket, 0666) < 0 || listen(a->listener.fd, 64) < 0)
        return -errno;
    return loop_add(&a->loop, &a->listener);
}

int caller_frame(struct session *s, const struct frame *f)
{
    struct agent *a = s->agent;
    struct frame out = *f;
    struct caller *c = a->callers;
    while (c != NULL && (c->session != s->number || c->call != f->call))
        c = c->next;
    if (c == NULL)
        return f->call <= s->last_call ? 0 : chan_broken(&a->host, "an unknown host call");
    int rc = again_from_host(c, f);
    if (rc != 1)
        return rc;
    switch (flow_check(&c->flow, FLOW_EXECUTOR, f)) {
    case FLOW_DROP:
        return 0;
    case FLOW_BROKEN:
        return chan_broken(&a->host, c->flow.why);
    case FLOW_PASS:
        break;
    }
    out.session = out.call = 0;
    if (c->chan.closed || c->chan.finishing)
        return 0;
    if (chan_send(&c->chan, &out) < 0) {
        chan_close(&c->chan);
        cancel(c);
    } else if (flow_over(&c->flow)) {
        chan_finish(&c->chan);
    }
    return 0;
}

void callers_close(struct agent *a, const struct session *s)
{
    for (struct caller *c = a->callers; c != NULL; c = c->next)
        if (c->session == s->number)
            chan_close(&c->chan); /* no CLOSE to the host: its session has ended as well */
}

void callers_sweep(struct agent *a)
{
    for (struct caller **p = &a->callers; *p != NULL;) {
        struct caller *c = *p;
        if (!c->chan.closed) {
            p = &c->next;
            continue;
        }
        *p = c->next;
        chan_release(&c->chan);
        message_reset(&c->message);
        free(c);
    }
}
