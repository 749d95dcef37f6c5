/* SPDX-License-Identifier: Apache-2.0 */
/* Channels: one for each connection, with a bounded number of bytes on their way in each
 * direction. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "channel.h"
#include "frame.h"

/* Reading from programs stops when this much waits for the host. */
enum { QUEUE_MAX = 262144 };

static int send_frame(struct forward *f, uint8_t type, uint32_t id, const void *data, size_t len)
{
    uint8_t raw[FORWARD_FRAME_MAX];
    struct forward_frame frame = {
        .type = type, .length = (uint16_t)len, .channel = id, .payload = data};
    return buf_append(&f->out, raw, forward_pack(raw, &frame));
}

static int send_number(struct forward *f, uint8_t type, uint32_t id, uint32_t number)
{
    uint8_t raw[4];
    put_le32(raw, number);
    return send_frame(f, type, id, raw, sizeof raw);
}

static int broken(struct forward *f, const char *why)
{
    f->why = why;
    return -EPROTO;
}

/* With reset the program sees a connection that was reset, and not an end of its input. */
static void drop(struct forward_channel *c, bool reset)
{
    if (c->socket.fd >= 0) {
        struct linger now = {.l_onoff = 1, .l_linger = 0};
        loop_remove(&c->forward->loop, &c->socket);
        if (reset)
            (void)setsockopt(c->socket.fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
        (void)close(c->socket.fd);
    }
    buf_free(&c->in);
    *c = (struct forward_channel){.socket = {.fd = -1}, .forward = c->forward};
}

static int fail(struct forward_channel *c, int error)
{
    struct forward *f = c->forward;
    uint32_t id = c->id;
    drop(c, true);
    return send_number(f, FORWARD_CLOSE, id, (uint32_t)error);
}

/* Both directions have ended. */
static void finish(struct forward_channel *c)
{
    if (c->eof_out && c->shut)
        drop(c, false);
}

static int write_program(struct forward_channel *c)
{
    struct forward *f = c->forward;
    while (c->in.len > 0) {
        ssize_t n = send(c->socket.fd, buf_head(&c->in), c->in.len, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        if (n < 0)
            return fail(c, errno);
        buf_consume(&c->in, (size_t)n);
        c->taken += (uint32_t)n;
    }
    if (c->taken >= FORWARD_WINDOW / 4 && !c->eof_in) {
        int rc = send_number(f, FORWARD_CREDIT, c->id, c->taken);
        if (rc < 0)
            return rc;
        c->taken = 0;
    }
    if (c->in.len == 0 && c->eof_in && !c->shut) {
        (void)shutdown(c->socket.fd, SHUT_WR);
        c->shut = true;
        finish(c);
    }
    return 0;
}

static int read_program(struct forward_channel *c)
{
    uint8_t data[FORWARD_DATA_MAX];
    struct forward *f = c->forward;
    size_t room = c->credit < sizeof data ? c->credit : sizeof data;
    ssize_t n = recv(c->socket.fd, data, room, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (n < 0)
        return fail(c, errno);
    if (n > 0) {
        c->credit -= (uint32_t)n;
        return send_frame(f, FORWARD_DATA, c->id, data, (size_t)n);
    }
    c->eof_out = true;
    int rc = send_frame(f, FORWARD_EOF, c->id, NULL, 0);
    finish(c);
    return rc;
}

static bool reads(const struct forward_channel *c)
{
    return c->connected && !c->eof_out && c->credit > 0 && c->forward->out.len < QUEUE_MAX;
}

static short want(struct source *s)
{
    const struct forward_channel *c = s->owner;
    short events = reads(c) ? POLLIN : 0;
    if (!c->connected || c->in.len > 0)
        events = (short)(events | POLLOUT);
    return events;
}

static int dial(struct forward_channel *c);

static int connected(struct forward_channel *c)
{
    int error = 0;
    socklen_t size = sizeof error;
    if (getsockopt(c->socket.fd, SOL_SOCKET, SO_ERROR, &error, &size) < 0)
        error = errno;
    if (error != 0) {
        loop_remove(&c->forward->loop, &c->socket);
        (void)close(c->socket.fd);
        c->socket.fd = -1;
        return dial(c);
    }
    c->connected = true;
    int rc = send_frame(c->forward, FORWARD_OPENED, c->id, NULL, 0);
    return rc < 0 ? rc : write_program(c);
}

static void ready(struct source *s, short revents)
{
    struct forward_channel *c = s->owner;
    int rc = 0;
    if (!c->connected) {
        rc = connected(c);
    } else {
        if (reads(c) && (revents & (POLLIN | POLLHUP | POLLERR)) != 0)
            rc = read_program(c);
        if (rc == 0 && c->id != 0 && (revents & (POLLOUT | POLLHUP | POLLERR)) != 0)
            rc = write_program(c);
    }
    if (rc < 0) {
        c->forward->why = strerror(-rc);
        c->forward->ended = true;
    }
}

/* Connect to the next address of the port. */
static int dial(struct forward_channel *c)
{
    struct forward *f = c->forward;
    int error = ECONNREFUSED;
    for (;;) {
        int fd = f->dial(f, c->tried);
        if (fd == -ENOENT) /* there are no more */
            return fail(c, error);
        c->tried++;
        if (fd >= 0) {
            c->socket = (struct source){.fd = fd, .want = want, .ready = ready, .owner = c};
            return loop_add(&f->loop, &c->socket);
        }
        error = -fd;
    }
}

static struct forward_channel *find(struct forward *f, uint32_t id)
{
    for (size_t i = 0; i < FORWARD_CHANNELS; i++)
        if (f->channel[i].id == id)
            return &f->channel[i];
    return NULL;
}

static int open_channel(struct forward *f, uint32_t id)
{
    struct forward_channel *c = find(f, 0);
    if (id <= f->last)
        return broken(f, "a channel that was opened before");
    f->last = id;
    if (c == NULL)
        return send_number(f, FORWARD_CLOSE, id, EMFILE);
    *c = (struct forward_channel){
        .socket = {.fd = -1}, .forward = f, .id = id, .credit = FORWARD_WINDOW};
    return dial(c);
}

static int take_data(struct forward_channel *c, const struct forward_frame *frame)
{
    if (c->eof_in)
        return broken(c->forward, "data after the end");
    if (c->in.len + c->taken + frame->length > FORWARD_WINDOW)
        return broken(c->forward, "more data than was allowed");
    int rc = buf_append(&c->in, frame->payload, frame->length);
    return rc < 0 || !c->connected ? rc : write_program(c);
}

static int take_credit(struct forward_channel *c, const struct forward_frame *frame)
{
    uint32_t more = get_le32(frame->payload);
    if (more == 0 || more > FORWARD_WINDOW - c->credit)
        return broken(c->forward, "more credit than was used");
    c->credit += more;
    return 0;
}

static int take(struct forward *f, const struct forward_frame *frame)
{
    if (frame->type == FORWARD_OPEN)
        return open_channel(f, frame->channel);
    if (frame->type == FORWARD_HELLO || frame->type == FORWARD_OPENED)
        return broken(f, "a frame that only guests send");
    if (frame->channel > f->last)
        return broken(f, "a channel that was not opened");
    struct forward_channel *c = find(f, frame->channel);
    if (c == NULL) /* it has ended, and this was on its way */
        return 0;
    switch (frame->type) {
    case FORWARD_DATA:
        return take_data(c, frame);
    case FORWARD_CREDIT:
        return take_credit(c, frame);
    case FORWARD_CLOSE:
        drop(c, true);
        return 0;
    default:
        if (c->eof_in)
            return broken(f, "two ends");
        c->eof_in = true;
        return c->connected ? write_program(c) : 0;
    }
}

int forward_feed(struct forward *f, const uint8_t *data, size_t len)
{
    struct forward_frame frame;
    int n = 0, rc = buf_append(&f->in, data, len);
    while (rc == 0 && (n = forward_unpack(buf_head(&f->in), (uint32_t)f->in.len, &frame)) > 0) {
        rc = take(f, &frame);
        buf_consume(&f->in, (size_t)n);
    }
    if (rc == 0 && n < 0)
        rc = broken(f, "a malformed frame");
    return rc;
}

void forward_free(struct forward *f)
{
    for (size_t i = 0; i < FORWARD_CHANNELS; i++)
        if (f->channel[i].id != 0)
            drop(&f->channel[i], true);
    buf_free(&f->in);
    buf_free(&f->out);
    loop_free(&f->loop);
}
