/* SPDX-License-Identifier: Apache-2.0 */
/* The clients' side: who may connect, and what clients may send. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shim.h"

enum {
    CLIENT_OUT_LIMIT = 32 << 20, /* windows of all its lanes, and some more */
    SILENCE_MS = 1500,           /* a client that is not stopped sends a PING every 200 ms */
    CHECK_MS = 1000,             /* between two checks of the state of clients, */
    CHECKS_MAX = 64, /* of at most so many at a time: some 15 us each on a busy machine */
};

struct client *client_find(const struct shim *s, uint32_t session)
{
    for (struct client *c = s->clients; c != NULL; c = c->next)
        if (c->session == session && !c->chan.closed)
            return c;
    return NULL;
}

struct host_call *client_call(struct client *c, uint32_t id)
{
    for (size_t i = 0; i < VHPC_CALLS_MAX; i++)
        if (c->call[i].id == id)
            return &c->call[i];
    return NULL;
}

/* Make the guest kill what this client has started there. */
static void close_session(struct client *c)
{
    struct frame f = {.type = VHPC_CLOSE, .session = c->session};
    if (c->known_to_agent && !c->shim->ended && !c->shim->lost)
        (void)chan_send(&c->shim->agent, &f);
    c->known_to_agent = false;
}

void client_drop(struct client *c, const char *why)
{
    if (why != NULL)
        log_line("client of uid %u dropped: %s", (unsigned)c->uid, why);
    close_session(c);
    chan_close(&c->chan);
}

/* Refuse with a reason that the user can read, then close the connection. */
static void refuse(struct client *c, int number, const char *text)
{
    (void)error_send(&c->chan, 0, 0, VHPC_ERR_REFUSED, number, text);
    close_session(c);
    chan_finish(&c->chan);
}

void client_greet(struct client *c)
{
    struct hello h;
    if (!c->said_hello || c->chan.closed)
        return;
    hello_init(&h);
    if (c->shim->agent_up)
        h = c->shim->agent_hello;
    h.shares = 1;
    h.state = c->shim->agent_up ? VHPC_STATE_UP : VHPC_STATE_BOOTING;
    (void)hello_send(&c->chan, &h);
}

static int on_hello(struct client *c, const struct frame *f)
{
    struct hello h;
    if (c->said_hello || hello_parse(f, &h) < 0)
        return chan_broken(&c->chan, "a malformed or unexpected HELLO");
    if (hello_version(&h) == 0) {
        refuse(c, EPROTONOSUPPORT, "no protocol version in common");
        return 0;
    }
    c->said_hello = true;
    client_greet(c);
    return 0;
}

static int pass_on(struct client *c, const struct frame *f)
{
    struct frame out = *f;
    out.session = c->session;
    if (c->shim->lost)
        return 0;
    c->known_to_agent = true;
    int rc = chan_send(&c->shim->agent, &out);
    if (rc < 0)
        shim_end(c->shim, SHIM_AGENT_BROKEN, "its channel accepts no more data");
    return 0;
}

static void send_signal(struct client *c, int number)
{
    uint8_t raw[4];
    struct frame f = {.type = VHPC_SIGNAL, .payload = raw, .length = sizeof raw};
    put_le32(raw, (uint32_t)number);
    (void)pass_on(c, &f);
}

/*
 * When a job is suspended, vhpc-run is stopped as well, by a signal that cannot be caught or by the
 * cgroup freezer, but the guest would continue to compute.  Slurm sends SIGTSTP to each process two
 * seconds before.  After SIGTSTP a client sends PINGs (front.c). If it falls silent, its program is
 * stopped until the client sends a frame again (the agent's signal.c).
 */
static void watch(struct client *c, int number)
{
    if (number == SIGTSTP)
        c->watched_until = c->heard_at + VHPC_WATCH_MS;
    else if (number == SIGCONT)
        c->watched_until = 0;
}

static int on_request(struct client *c, const struct frame *f)
{
    if (c->uid != 0) {
        refuse(c, EPERM, "only root may send control operations");
        return 0;
    }
    if (f->call != 0 || f->length > VHPC_MESSAGE_MAX - c->request_len ||
        c->requests_pending >= VHPC_PENDING_MAX)
        return chan_broken(&c->chan, "a REQUEST that is too long, or too many REQUESTs");
    c->request_len += f->length;
    if ((f->flags & VHPC_MORE) == 0) {
        c->request_len = 0;
        c->requests_pending++;
    }
    return pass_on(c, f);
}

static int on_command(struct client *c, const struct frame *f)
{
    bool first = c->flow.phase == FLOW_IDLE;
    switch (flow_check(&c->flow, FLOW_INITIATOR, f)) {
    case FLOW_DROP:
        return 0;
    case FLOW_BROKEN:
        return chan_broken(&c->chan, c->flow.why);
    case FLOW_PASS:
        break;
    }
    if (f->type == VHPC_SIGNAL) {
        int number = (int)get_le32(f->payload);
        watch(c, number);
        if (c->shim->held && number == SIGTERM)
            shim_client_ends(c);
    }
    if (first && c->flow.phase != FLOW_CLOSED && c->uid != 0 && c->flow.uid != c->uid) {
        refuse(c, EPERM, "you may run programs as your own user only");
        return 0;
    }
    return pass_on(c, f);
}

static int on_host_call(struct client *c, const struct frame *f)
{
    struct host_call *call = client_call(c, f->call);
    if (call == NULL)
        /* The caller in the guest has closed its connection: this frame was already on its way. */
        return f->call <= c->last_call ? 0 : chan_broken(&c->chan, "an unknown host call");
    switch (flow_check(&call->flow, FLOW_EXECUTOR, f)) {
    case FLOW_DROP:
        return 0;
    case FLOW_BROKEN:
        return chan_broken(&c->chan, call->flow.why);
    case FLOW_PASS:
        break;
    }
    if (flow_over(&call->flow))
        call->id = 0;
    return pass_on(c, f);
}

static int on_frame(struct chan *chan, const struct frame *f)
{
    struct client *c = chan->owner;
    if (f->session != 0)
        return chan_broken(chan, "a session number from a client");
    if (f->type == VHPC_HELLO)
        return on_hello(c, f);
    if (!c->said_hello || !c->shim->agent_up)
        return chan_broken(chan, "a frame before HELLO was answered");
    if (f->type == VHPC_SHARE)
        return share_asked(c, f);
    if (f->type == VHPC_SHARED)
        return share_mapped(c, f);
    c->heard_at = now_ms();
    c->silent = false;
    switch (f->type) {
    case VHPC_REQUEST:
        return on_request(c, f);
    case VHPC_PING:
        if (f->call != 0 || f->length > 64 || f->flags != 0 || c->pings_pending >= VHPC_PENDING_MAX)
            return chan_broken(chan, "a malformed PING, or too many PINGs");
        c->pings_pending++;
        return pass_on(c, f);
    case VHPC_REPLY:
    case VHPC_PONG:
        return chan_broken(chan, "an answer from a client");
    default:
        return f->call == 0 ? on_command(c, f) : on_host_call(c, f);
    }
}

static void on_close(struct chan *chan, int error)
{
    const char *why = NULL;
    if (error == -EPROTO)
        why = chan->why != NULL ? chan->why : "protocol violation";
    client_drop(chan->owner, why);
    /* The connection is closed already, so client_drop only closes the session. */
}

static bool may_read(struct chan *chan)
{
    const struct client *c = chan->owner;
    return !c->shim->agent_up || chan_queued(&c->shim->agent) < CHAN_HIGH;
}

bool shim_check_silent(struct shim *s, long long now)
{
    bool any = false;
    for (struct client *c = s->clients; c != NULL; c = c->next) {
        if (c->watched_until == 0 || c->chan.closed || s->ended)
            continue;
        if (!c->silent && c->flow.phase == FLOW_RUNNING && may_read(&c->chan) &&
            now - c->heard_at > SILENCE_MS) {
            c->silent = true;
            send_signal(c, SIGSTOP);
        }
        if (now > c->watched_until)
            c->watched_until = 0;
        any = any || c->watched_until != 0;
    }
    return any;
}

/* Whether a signal has stopped the process; no if its state cannot be read, as with hidepid. */
static bool is_stopped(pid_t pid)
{
    char path[32], text[128]; /* the name before the state has at most 64 bytes */
    (void)snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = pid > 0 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text);
    if (fd >= 0)
        (void)close(fd);
    const char *end = n > 0 ? memrchr(text, ')', (size_t)n) : NULL;
    return end != NULL && end + 2 < text + n && end[2] == 'T';
}

/*
 * SIGSTOP cannot be caught: vhpc-run stops and cannot inform the guest. The shim does not get the
 * signal, so it checks. A frame that the client sent before it was stopped may arrive afterwards
 * and continue its program: then the program is stopped again.
 */
static void check_stopped(struct client *c, long long now)
{
    if (!is_stopped(c->pid)) {
        c->stopped_at = 0;
    } else if (c->stopped_at == 0 || c->heard_at >= c->stopped_at) {
        c->stopped_at = now;
        send_signal(c, SIGSTOP);
    }
}

int shim_check_stopped(struct shim *s, long long now)
{
    bool any = false, due = now >= s->check_at;
    int checks = 0;
    /* Later sessions come first in the list: continue below the last one that was checked. */
    for (struct client *c = s->clients; c != NULL; c = c->next) {
        if (c->chan.closed || s->ended || c->flow.phase != FLOW_RUNNING)
            continue;
        any = true;
        if (!due || checks == CHECKS_MAX ||
            (s->checked_below != 0 && c->session >= s->checked_below))
            continue;
        check_stopped(c, now);
        if (++checks == CHECKS_MAX)
            s->checked_below = c->session;
    }
    if (due) {
        s->check_at = now + CHECK_MS;
        if (checks < CHECKS_MAX)
            s->checked_below = 0;
    }
    return any ? (int)(s->check_at - now) : -1;
}

int client_adopt(struct shim *s, struct client *c, int fd, uid_t uid)
{
    c->shim = s;
    c->uid = uid;
    c->session = s->next_session;
    c->chan.out_limit = CLIENT_OUT_LIMIT;
    c->chan.on_frame = on_frame;
    c->chan.on_close = on_close;
    c->chan.may_read = may_read;
    c->chan.owner = c;
    int rc = chan_open(&c->chan, &s->loop, fd);
    if (rc < 0)
        return rc;
    s->next_session++;
    c->next = s->clients;
    s->clients = c;
    s->client_count++;
    return 0;
}

void shim_accept(struct shim *s, int listener)
{
    struct ucred peer;
    socklen_t len = sizeof peer;
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return;
    struct client *c = calloc(1, sizeof *c);
    if (c == NULL || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) < 0 ||
        s->next_session == UINT32_MAX) {
        free(c);
        (void)close(fd);
        return;
    }
    if (client_adopt(s, c, fd, peer.uid) < 0) {
        free(c);
        (void)close(fd);
        return;
    }
    c->pid = peer.pid;
    if (peer.uid != 0 && peer.uid != s->uid)
        refuse(c, EPERM, "this guest belongs to another user");
    else if (peer.uid != 0 && s->client_count > s->clients_max)
        refuse(c, EAGAIN, "too many programs in this guest at once");
    else if (s->ended)
        refuse(c, ENOTCONN, "the guest is gone");
}

void shim_sweep(struct shim *s)
{
    for (struct client **p = &s->clients; *p != NULL;) {
        struct client *c = *p;
        /* The agent's side still writes into the memory of one that it is filling. */
        if (!c->chan.closed || (c == s->filling && !s->agent.closed)) {
            p = &c->next;
            continue;
        }
        *p = c->next;
        s->client_count--;
        share_end(c);
        chan_release(&c->chan);
        free(c);
    }
}
