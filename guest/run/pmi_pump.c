/* SPDX-License-Identifier: Apache-2.0 */
#include "pmi_pump.h"

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PART = 4096 };

/* End at once: after an error, or when the receiver is gone. */
static void stop(struct pmi_pump *p)
{
    loop_remove(p->loop, &p->from);
    loop_remove(p->loop, &p->to);
    (void)close(p->to.fd);
    p->over = true;
    buf_free(&p->out);
    buf_free(&p->filter.held);
}

static void end_if_over(struct pmi_pump *p)
{
    if (!p->over || p->out.len > 0)
        return;
    loop_remove(p->loop, &p->to);
    (void)close(p->to.fd);
    buf_free(&p->out);
}

static short from_want(struct source *s)
{
    const struct pmi_pump *p = s->owner;
    return p->out.len == 0 && !p->waits ? POLLIN : 0;
}

static void from_ready(struct source *s, short revents)
{
    struct pmi_pump *p = s->owner;
    uint8_t part[PART];
    int rc;
    (void)revents;
    ssize_t n = read(s->fd, part, sizeof part);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n > 0) {
        rc = pmi_filter(&p->filter, part, (size_t)n, &p->out);
    } else {
        p->over = true;
        loop_remove(p->loop, &p->from);
        rc = pmi_filter_end(&p->filter, &p->out);
    }
    if (rc < 0)
        stop(p);
    else
        end_if_over(p);
}

static short to_want(struct source *s)
{
    const struct pmi_pump *p = s->owner;
    return p->out.len > 0 ? POLLOUT : 0;
}

static void to_ready(struct source *s, short revents)
{
    struct pmi_pump *p = s->owner;
    (void)revents;
    ssize_t n = send(s->fd, buf_head(&p->out), p->out.len, MSG_NOSIGNAL);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n < 0) {
        stop(p);
        return;
    }
    buf_consume(&p->out, (size_t)n);
    end_if_over(p);
}

int pmi_pump_start(struct pmi_pump *p, struct loop *loop, int server, uint32_t tasks,
                   uint32_t guests)
{
    int ends[2], rc;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) < 0)
        return -errno;
    *p = (struct pmi_pump){
        .loop = loop,
        .from = {.fd = server, .want = from_want, .ready = from_ready, .owner = p},
        .to = {.fd = ends[0], .want = to_want, .ready = to_ready, .owner = p},
        .filter = {.tasks = tasks, .guests = guests},
    };
    rc = loop_add(loop, &p->from);
    if (rc == 0 && (rc = loop_add(loop, &p->to)) < 0)
        loop_remove(loop, &p->from);
    if (rc == 0)
        return ends[1];
    (void)close(ends[0]);
    (void)close(ends[1]);
    return rc;
}
