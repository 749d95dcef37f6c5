/* SPDX-License-Identifier: Apache-2.0 */
#include "exchange.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    ROOM_MIN = VHPC_WINDOW / 16, /* with less credit, wait: no small frames */
    STAGE_MIN = 16 << 10,        /* less than this is copied, because that is faster */
    PAGE = 4096,
    GRANT_MIN = VHPC_WINDOW / 2,   /* credit is returned in pieces of at least this size */
    WRITE_TURN = VHPC_PAYLOAD_MAX, /* bytes written to one fd per turn */
};

static void changed(struct exchange *x)
{
    if (x->changed != NULL)
        x->changed(x);
}

/* --- inlets ----------------------------------------------------------------- */

static void inlet_release(struct inlet *in)
{
    in->muted = false;
    loop_remove(in->exchange->loop, &in->source);
    localfd_release(in->source.fd, in->kind, SHUT_RD);
}

/* mute: the other end reads no more; if that is checked, the program may write on. */
static void inlet_end(struct inlet *in, bool mute)
{
    if (!in->open)
        return;
    in->open = false;
    in->muted = mute && in->number > STDERR_FILENO && in->exchange->pass != NULL;
    if (!in->muted)
        inlet_release(in);
    (void)exchange_send(in->exchange, VHPC_EOF, in->number, 0, NULL, 0);
    changed(in->exchange);
}

static void read_muted(struct inlet *in)
{
    uint8_t part[1024];
    ssize_t n = read(in->source.fd, part, sizeof part);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    if (n <= 0)
        inlet_release(in);
    else
        (void)in->exchange->pass(in->exchange, in->number, part, (size_t)n);
}

static bool inlet_may_send(const struct inlet *in)
{
    const struct exchange *x = in->exchange;
    if (x->quiet != NULL && x->quiet(x, in->number))
        return false;
    return x->live && flow_room(&x->flow, x->side, in->number) >= ROOM_MIN &&
           chan_queued(x->chan) < CHAN_HIGH && !(in->pipe && x->chan->staged > 0);
}

static short inlet_want(struct source *s)
{
    const struct inlet *in = s->owner;
    return in->muted || inlet_may_send(in) ? POLLIN : 0;
}

/*
 * Pass on the contents of a pipe without copying. False: there is too little, or it is not possible
 * now.
 */
static bool inlet_move(struct inlet *in, uint32_t room)
{
    struct exchange *x = in->exchange;
    uint32_t most = VHPC_PAYLOAD_MAX - PAGE; /* the header takes the place of a page */
    int held = 0;
    if (!in->pipe || !chan_can_stage(x->chan) || ioctl(in->source.fd, FIONREAD, &held) < 0 ||
        held < STAGE_MIN)
        return false;
    if (most > room)
        most = room;
    if (most > (uint32_t)held)
        most = (uint32_t)held;
    struct frame f = {.type = VHPC_DATA,
                      .fd = in->number,
                      .session = x->session,
                      .call = x->call,
                      /* Part of a page would have to be copied. */
                      .length = most - most % PAGE};
    if (chan_send_from_pipe(x->chan, &f, in->source.fd) < 0)
        return false;
    (void)flow_check(&x->flow, x->side, &f); /* there was enough credit, so it passes */
    return true;
}

/* --- ends of outlets, and data of inlets ---------------------------------------- */

static void outlet_end(struct outlet *out)
{
    if (!out->open)
        return;
    out->open = false;
    loop_remove(out->exchange->loop, &out->source);
    localfd_release(out->source.fd, out->kind, SHUT_WR);
    buf_free(&out->queue);
    changed(out->exchange);
}

/* The local reader has closed its end, or writing fails for good: tell the sender to stop. */
static void outlet_fail(struct outlet *out)
{
    struct exchange *x = out->exchange;
    if (!x->flow.lane[out->number][1 - x->side].eof)
        (void)exchange_send(x, VHPC_EOF, out->number, VHPC_READER, NULL, 0);
    outlet_end(out);
}

static void inlet_ready(struct source *s, short revents)
{
    static uint8_t scratch[VHPC_PAYLOAD_MAX];
    struct inlet *in = s->owner;
    (void)revents;
    if (in->muted) {
        read_muted(in);
        return;
    }
    if (!inlet_may_send(in))
        return;
    uint32_t room = flow_room(&in->exchange->flow, in->exchange->side, in->number);
    if (inlet_move(in, room))
        return;
    ssize_t n = read(s->fd, scratch, room < sizeof scratch ? room : sizeof scratch);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    if (n > 0) {
        struct exchange *x = in->exchange;
        if (x->pass == NULL || x->pass(x, in->number, scratch, (size_t)n))
            (void)exchange_send(x, VHPC_DATA, in->number, 0, scratch, (size_t)n);
        return;
    }
    bool gone = in->kind == LOCALFD_SOCKET && localfd_hung_up(s->fd);
    inlet_end(in, false); /* EIO of a pty: no process has it open any more */
    if (gone && in->exchange->outlet[in->number].open)
        outlet_fail(&in->exchange->outlet[in->number]);
}

/* --- outlets -------------------------------------------------------------------- */

static void outlet_grant(struct outlet *out)
{
    struct exchange *x = out->exchange;
    uint8_t raw[4];
    bool all = out->sync && out->queue.len == 0;
    bool eof = out->eof || x->flow.lane[out->number][1 - x->side].eof;
    out->sync = out->sync && !all;
    if (out->owed == 0 || (!all && (out->owed < GRANT_MIN || eof)))
        return;
    put_le32(raw, out->owed);
    out->owed = 0;
    (void)exchange_send(x, VHPC_CREDIT, out->number, 0, raw, sizeof raw);
}

static short outlet_want(struct source *s)
{
    const struct outlet *out = s->owner;
    return out->exchange->live && out->queue.len > 0 ? POLLOUT : 0;
}

static void outlet_ready(struct source *s, short revents)
{
    struct outlet *out = s->owner;
    size_t turn = WRITE_TURN;
    bool careful = out->kind == LOCALFD_SHARED && !out->regular;
    (void)revents;
    while (out->queue.len > 0 && turn > 0) {
        size_t part = out->queue.len < turn ? out->queue.len : turn;
        if (careful && part > PIPE_BUF)
            part = PIPE_BUF;
        if (careful && !localfd_writable(s->fd))
            break;
        ssize_t n = write(s->fd, buf_head(&out->queue), part);
        if (n < 0 && (errno == EINTR || errno == EAGAIN))
            break;
        if (n < 0 && (errno == ENOSPC || errno == EDQUOT) && out->regular &&
            out->exchange->no_room != NULL && out->exchange->no_room(out->exchange, part, errno))
            n = (ssize_t)part;
        if (n < 0) {
            outlet_fail(out);
            return;
        }
        buf_consume(&out->queue, (size_t)n);
        out->owed += (uint32_t)n;
        turn -= (size_t)n;
        if (n == 0)
            break;
    }
    outlet_grant(out);
    if (out->queue.len > 0)
        return;
    if (out->eof && !out->tty)
        outlet_end(out);
    else
        changed(out->exchange);
}

/* A file takes what arrives at once, so it is written from where it is. Other bytes are queued. */
static int outlet_push(struct outlet *out, const struct frame *f)
{
    ssize_t n = 0;
    if (!out->open || out->eof)
        return 0; /* the sender knows; this frame was already on its way */
    if (out->regular && out->queue.len == 0 && out->exchange->live)
        n = write(out->source.fd, f->payload, f->length);
    uint32_t written = n > 0 ? (uint32_t)n : 0; /* outlet_ready() gets the error again */
    out->owed += VHPC_HEADER + written;
    if (written > 0)
        outlet_grant(out);
    return buf_append(&out->queue, f->payload + written, f->length - written);
}

/* Also if the outlet has ended: its last credit is not returned by itself. */
static void outlet_sync(struct outlet *out)
{
    out->sync = true;
    outlet_grant(out);
}

static int outlet_eof(struct outlet *out)
{
    static const uint8_t end_of_file = 4; /* VEOF of a new pty */
    if (!out->open || out->eof)
        return 0;
    out->eof = true;
    if (out->tty)
        return buf_append(&out->queue, &end_of_file, 1);
    if (out->queue.len == 0)
        outlet_end(out);
    return 0;
}

/* --- the whole -------------------------------------------------------------- */

void exchange_init(struct exchange *x, enum flow_side side, struct loop *loop, struct chan *chan,
                   uint32_t session, uint32_t call)
{
    *x = (struct exchange){
        .side = side, .loop = loop, .chan = chan, .session = session, .call = call};
    for (int i = 0; i < VHPC_FDS_MAX; i++) {
        x->inlet[i].exchange = x->outlet[i].exchange = x;
        x->inlet[i].number = x->outlet[i].number = (uint8_t)i;
    }
}

int exchange_read_from(struct exchange *x, uint8_t number, int fd, enum localfd kind)
{
    struct inlet *in = &x->inlet[number];
    struct stat st;
    in->source = (struct source){.fd = fd, .want = inlet_want, .ready = inlet_ready, .owner = in};
    in->kind = kind;
    in->pipe = fstat(fd, &st) == 0 && S_ISFIFO(st.st_mode);
    int rc = loop_add(x->loop, &in->source);
    in->open = rc == 0;
    return rc;
}

int exchange_write_to(struct exchange *x, uint8_t number, int fd, enum localfd kind)
{
    struct outlet *out = &x->outlet[number];
    struct stat st;
    out->source =
        (struct source){.fd = fd, .want = outlet_want, .ready = outlet_ready, .owner = out};
    out->kind = kind;
    out->regular = fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
    int rc = loop_add(x->loop, &out->source);
    out->open = rc == 0;
    return rc;
}

int exchange_connect(struct exchange *x, uint8_t number, int fd)
{
    int other = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    int rc = other < 0 ? -errno : exchange_read_from(x, number, fd, LOCALFD_SOCKET);
    if (rc < 0) {
        (void)close(fd);
        if (other >= 0)
            (void)close(other);
        return rc;
    }
    rc = exchange_write_to(x, number, other, LOCALFD_SOCKET);
    if (rc < 0)
        (void)close(other); /* the exchange has the other one */
    return rc;
}

int exchange_send(struct exchange *x, uint8_t type, uint8_t number, uint16_t flags,
                  const void *payload, size_t len)
{
    struct frame f = {.type = type,
                      .fd = number,
                      .flags = flags,
                      .session = x->session,
                      .call = x->call,
                      .length = (uint32_t)len,
                      .payload = payload};
    if (flow_check(&x->flow, x->side, &f) != FLOW_PASS)
        return 0; /* the command has ended meanwhile */
    return chan_send(x->chan, &f);
}

int exchange_receive(struct exchange *x, const struct frame *f)
{
    enum flow_side from = x->side == FLOW_INITIATOR ? FLOW_EXECUTOR : FLOW_INITIATOR;
    switch (flow_check(&x->flow, from, f)) {
    case FLOW_DROP:
        return 0;
    case FLOW_BROKEN:
        return -EPROTO;
    case FLOW_PASS:
        break;
    }
    switch (f->type) {
    case VHPC_DATA:
        if (x->heard != NULL)
            x->heard(x, f->fd, f->payload, f->length);
        return outlet_push(&x->outlet[f->fd], f);
    case VHPC_EOF:
        if ((f->flags & VHPC_READER) == 0)
            return outlet_eof(&x->outlet[f->fd]);
        inlet_end(&x->inlet[f->fd], true);
        return 0;
    case VHPC_CREDIT:
        return 0; /* flow_check has already counted it */
    case VHPC_SYNC:
        outlet_sync(&x->outlet[f->fd]);
        return 0;
    default:
        return 1;
    }
}

bool exchange_inlets_done(const struct exchange *x)
{
    for (int i = 0; i < VHPC_FDS_MAX; i++)
        if (x->inlet[i].open)
            return false;
    return true;
}

bool exchange_outlets_done(const struct exchange *x)
{
    for (int i = 0; i < VHPC_FDS_MAX; i++)
        if (x->outlet[i].open && x->outlet[i].queue.len > 0)
            return false;
    return true;
}

bool exchange_inlets_idle(const struct exchange *x)
{
    for (int i = 0; i < VHPC_FDS_MAX; i++) {
        struct pollfd p = {.fd = x->inlet[i].source.fd, .events = POLLIN};
        if (!x->inlet[i].open)
            continue;
        if (!inlet_may_send(&x->inlet[i]) || poll(&p, 1, 0) != 0)
            return false;
    }
    return true;
}

void exchange_end_inlets(struct exchange *x)
{
    for (int i = 0; i < VHPC_FDS_MAX; i++)
        inlet_end(&x->inlet[i], false);
}

void exchange_close(struct exchange *x)
{
    x->changed = NULL;
    x->live = false;
    for (int i = 0; i < VHPC_FDS_MAX; i++) {
        if (x->inlet[i].open || x->inlet[i].muted) {
            x->inlet[i].open = false;
            inlet_release(&x->inlet[i]);
        }
        outlet_end(&x->outlet[i]);
    }
}
