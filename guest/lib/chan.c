/* SPDX-License-Identifier: Apache-2.0 */
#include "chan.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

int fd_prepare(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
        fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
        return -errno;
    return 0;
}

int fd_connect(const char *path)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof to.sun_path)
        return -ENAMETOOLONG;
    memcpy(to.sun_path, path, strlen(path));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    if (connect(fd, (struct sockaddr *)&to, sizeof to) < 0) {
        int rc = -errno;
        (void)close(fd);
        return rc;
    }
    return fd;
}

/* Close because of the peer or an error, and inform the owner. */
static void lost(struct chan *c, int error)
{
    if (c->closed)
        return;
    chan_close(c);
    c->on_close(c, error);
}

/* Without the descriptors if they are too many on their way: the peer looks whether they came. */
static ssize_t give_and_write(struct chan *c, size_t len)
{
    ssize_t n = passfd_write(c->source.fd, buf_head(&c->out), len, &c->gives);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return n;
    passfd_close(&c->gives);
    return n > 0 ? n : write(c->source.fd, buf_head(&c->out), len);
}

/* Send what is next: bytes of the queue, or the staged payload if it is its turn. */
static ssize_t send_some(struct chan *c)
{
    ssize_t n;
    if (c->staged > 0 && c->ahead == 0) {
        n = splice(c->stage[0], NULL, c->source.fd, NULL, c->staged, SPLICE_F_NONBLOCK);
        if (n > 0)
            c->staged -= (size_t)n;
        return n;
    }
    size_t len = c->staged > 0 ? c->ahead : c->out.len;
    if (c->gives.count > 0)
        n = give_and_write(c, len);
    else
        n = write(c->source.fd, buf_head(&c->out), len);
    if (n > 0)
        buf_consume(&c->out, (size_t)n);
    if (n > 0 && c->staged > 0)
        c->ahead -= (size_t)n;
    return n;
}

/* Write until the queue is empty or the peer accepts no more; 0 or -errno. */
static int flush(struct chan *c)
{
    while (chan_queued(c) > 0) {
        ssize_t n = send_some(c);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN ? 0 : -errno;
        if (n == 0)
            return 0;
    }
    return 0;
}

static short chan_want(struct source *s)
{
    struct chan *c = s->owner;
    short events = 0;
    /*
     * All frames of one turn are sent by one write. An error is not lost: the queue stays, poll
     * reports the fd, and ready() gets the error again.
     */
    (void)flush(c);
    if (chan_queued(c) > 0 || c->finishing)
        events |= POLLOUT;
    if (!c->finishing && (c->may_read == NULL || c->may_read(c)))
        events |= POLLIN;
    return events;
}

/* The payload of the last frame in the queue is not complete: receive it where it belongs. */
static void find_place(struct chan *c, const struct frame *f)
{
    size_t have = c->in.len - VHPC_HEADER;
    uint8_t *place = c->place_for != NULL ? c->place_for(c, f) : NULL;
    if (place == NULL)
        return;
    memcpy(place, buf_head(&c->in) + VHPC_HEADER, have);
    buf_consume(&c->in, c->in.len);
    c->placed = *f;
    c->placed.payload = place;
    c->place = place;
    c->filled = have;
}

/* Pass the complete frames to the owner; 0 or -errno. */
static int dispatch(struct chan *c)
{
    while (!c->closed && !c->finishing && c->in.len >= VHPC_HEADER) {
        struct frame f;
        if (frame_unpack(buf_head(&c->in), &f) < 0)
            return chan_broken(c, "an invalid frame header");
        if (c->in.len - VHPC_HEADER < f.length) {
            find_place(c, &f);
            return 0;
        }
        f.payload = buf_head(&c->in) + VHPC_HEADER;
        int rc = c->on_frame(c, &f);
        if (rc < 0)
            return rc;
        if (!c->closed)
            buf_consume(&c->in, VHPC_HEADER + f.length);
    }
    return 0;
}

/* into: the rest of a placed payload, which may be empty, and room behind it. */
static ssize_t receive_some(struct chan *c, const struct iovec into[2])
{
    if (into[0].iov_len > 0)
        return readv(c->source.fd, into, 2);
    return c->may_take ? passfd_read(c->source.fd, into[1].iov_base, into[1].iov_len, &c->takes)
                       : read(c->source.fd, into[1].iov_base, into[1].iov_len);
}

/*
 * Read once; bytes, 0 at the end of the connection, or -errno. *emptied: a socket has no more now.
 */
static ssize_t receive_part(struct chan *c, bool *emptied)
{
    size_t rest = c->place != NULL ? c->placed.length - c->filled : 0;
    size_t len = c->places && c->in.len == 0 ? CHAN_HEAD : VHPC_HEADER + VHPC_PAYLOAD_MAX;
    if (buf_reserve(&c->in, len) < 0)
        return -ENOMEM;
    struct iovec into[] = {
        {.iov_base = rest > 0 ? c->place + c->filled : NULL, .iov_len = rest},
        {.iov_base = c->in.data + c->in.head + c->in.len, .iov_len = len},
    };
    ssize_t n = receive_some(c, into);
    if (n < 0)
        return -errno;
    size_t placed = (size_t)n < rest ? (size_t)n : rest;
    c->filled += placed;
    c->in.len += (size_t)n - placed;
    /* A read ends behind descriptors, too. */
    *emptied = !c->port && !c->may_take && (size_t)n < rest + len;
    return n;
}

/* Pass on what is complete; 0 or -errno. */
static int handle(struct chan *c)
{
    if (c->place != NULL && c->filled < c->placed.length)
        return 0;
    bool placed = c->place != NULL;
    c->place = NULL;
    int rc = placed ? c->on_frame(c, &c->placed) : 0;
    return rc < 0 ? rc : dispatch(c);
}

static void receive(struct chan *c)
{
    size_t budget = CHAN_READ;
    bool emptied = false;
    while (!c->closed && !c->finishing && budget > 0 && !emptied) {
        if (c->may_read != NULL && !c->may_read(c))
            return;
        ssize_t n = receive_part(c, &emptied);
        if (n == -EINTR)
            continue;
        if (n == -EAGAIN)
            return;
        if (n <= 0) {
            lost(c, (int)n);
            return;
        }
        budget -= (size_t)n < budget ? (size_t)n : budget;
        int rc = handle(c);
        if (rc < 0) {
            lost(c, rc);
            return;
        }
    }
}

static void chan_ready(struct source *s, short revents)
{
    struct chan *c = s->owner;
    int rc = flush(c);
    if (rc < 0 && rc != -EPIPE) {
        lost(c, rc);
        return;
    }
    if (c->finishing) {
        if (chan_queued(c) == 0 || rc < 0 || (revents & (POLLHUP | POLLERR | POLLNVAL)))
            lost(c, 0);
        return;
    }
    /* After EPIPE, the last frames of the peer may still be unread. */
    if (revents & POLLIN || (rc == -EPIPE && !c->port))
        receive(c);
    else if (revents & (POLLHUP | POLLERR | POLLNVAL))
        lost(c, 0);
    if (rc == -EPIPE)
        lost(c, -EPIPE);
}

int chan_open(struct chan *c, struct loop *loop, int fd)
{
    c->loop = loop;
    c->source = (struct source){.fd = fd, .want = chan_want, .ready = chan_ready, .owner = c};
    if (c->out_limit == 0)
        c->out_limit = CHAN_OUT_LIMIT;
    return loop_add(loop, &c->source);
}

int chan_send(struct chan *c, const struct frame *f)
{
    uint8_t head[VHPC_HEADER];
    if (c->closed || c->finishing)
        return -ENOTCONN;
    if (c->out.len + sizeof head + f->length > c->out_limit)
        return chan_broken(c, "the peer does not read the data that waits for it");
    int rc = buf_reserve(&c->out, sizeof head + f->length);
    if (rc < 0)
        return rc;
    frame_pack(head, f);
    (void)buf_append(&c->out, head, sizeof head);
    return buf_append(&c->out, f->payload, f->length);
}

/* The pipe of staged payloads; 0 or -errno. */
static int open_stage(struct chan *c)
{
    if (c->stage[1] > 0)
        return 0;
    if (pipe2(c->stage, O_CLOEXEC | O_NONBLOCK) < 0)
        return -errno;
    /*
     * One virtqueue entry for each page, and not more than a queue without indirect descriptors
     * has: the driver would lose what does not fit into one.
     */
    (void)fcntl(c->stage[1], F_SETPIPE_SZ, VHPC_PAYLOAD_MAX);
    return 0;
}

int chan_send_from_pipe(struct chan *c, struct frame *f, int pipe)
{
    uint8_t head[VHPC_HEADER];
    if (c->closed || c->finishing)
        return -ENOTCONN;
    int rc = open_stage(c);
    if (rc == 0)
        rc = buf_reserve(&c->out, sizeof head);
    if (rc < 0)
        return rc;
    /* With the header in front, a payload is one message to the host: one interrupt, one wakeup. */
    frame_pack(head, f);
    if (write(c->stage[1], head, sizeof head) != (ssize_t)sizeof head)
        return -EIO;
    ssize_t n = splice(pipe, NULL, c->stage[1], NULL, f->length, SPLICE_F_NONBLOCK);
    rc = n > 0 ? 0 : n < 0 ? -errno : -EAGAIN;
    if (n == (ssize_t)f->length) {
        c->staged = sizeof head;
    } else {
        /* The pages are not full and the stage has no room left: the header announced too much. */
        (void)!read(c->stage[0], head, sizeof head);
        if (rc < 0)
            return rc;
        f->length = (uint32_t)n;
        frame_pack(head, f);
        (void)buf_append(&c->out, head, sizeof head);
    }
    c->staged += (size_t)n;
    c->ahead = c->out.len;
    return 0;
}

int chan_send_message(struct chan *c, uint8_t type, uint32_t session, uint32_t call,
                      const struct buf *message)
{
    const uint8_t *p = buf_head(message);
    size_t left = message->len;
    if (left > VHPC_MESSAGE_MAX)
        return -EMSGSIZE;
    do {
        size_t part = left < VHPC_PAYLOAD_MAX ? left : VHPC_PAYLOAD_MAX;
        left -= part;
        int rc = chan_send(c, &(struct frame){.type = type,
                                              .flags = left > 0 ? VHPC_MORE : 0,
                                              .session = session,
                                              .call = call,
                                              .length = (uint32_t)part,
                                              .payload = p});
        if (rc < 0)
            return rc;
        p += part;
    } while (left > 0);
    return 0;
}

void chan_close(struct chan *c)
{
    if (c->closed || c->loop == NULL)
        return;
    c->closed = true;
    loop_remove(c->loop, &c->source);
    (void)close(c->source.fd);
    c->source.fd = -1;
    buf_free(&c->out);
    if (c->stage[1] > 0) {
        (void)close(c->stage[0]);
        (void)close(c->stage[1]);
    }
    c->stage[0] = c->stage[1] = 0;
    c->staged = 0;
    c->place = NULL;
    passfd_close(&c->gives);
    /* c->in stays: the frame that is being handled may be in it. chan_release() frees it. */
}

void chan_release(struct chan *c)
{
    chan_close(c);
    passfd_close(&c->takes);
    buf_free(&c->in);
    buf_free(&c->out);
}

void chan_finish(struct chan *c)
{
    c->finishing = true;
}

int chan_broken(struct chan *c, const char *why)
{
    c->why = why;
    return -EPROTO;
}

int message_add(struct message *m, const struct frame *f)
{
    if (m->type != 0 && m->type != f->type)
        return -EPROTO;
    if (f->length > VHPC_MESSAGE_MAX - m->data.len || (m->type != 0 && f->length == 0))
        return -EPROTO;
    m->type = f->type;
    int rc = buf_append(&m->data, f->payload, f->length);
    if (rc < 0)
        return rc;
    return f->flags & VHPC_MORE ? 0 : 1;
}

void message_reset(struct message *m)
{
    m->type = 0;
    buf_free(&m->data);
}
