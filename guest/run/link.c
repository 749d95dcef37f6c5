/* SPDX-License-Identifier: Apache-2.0 */
#include "link.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "hello.h"
#include "tlv.h"

enum { CONNECT_MS = 10000 };

static void stop_connecting(struct link *l)
{
    if (l->connecting.fd < 0)
        return;
    loop_remove(l->exchange.loop, &l->connecting);
    (void)close(l->connecting.fd);
    l->connecting.fd = -1;
}

static void fail(struct link *l, int number)
{
    struct frame f = {.type = VHPC_ERROR};
    char text[128];
    (void)snprintf(text, sizeof text, "%s does not answer: %s", l->server->name, strerror(number));
    stop_connecting(l);
    if (flow_check(&l->exchange.flow, FLOW_EXECUTOR, &f) == FLOW_PASS)
        (void)error_send(l->exchange.chan, 0, l->exchange.call, VHPC_ERR_INTERNAL, number, text);
    exchange_close(&l->exchange);
    l->over = true;
}

/* When both directions have ended, the call has. */
static void changed(struct exchange *x)
{
    struct link *l = x->owner;
    struct buf b = {0};
    if (l->over || x->inlet[0].open || x->outlet[0].open)
        return;
    l->over = true;
    if (tlv_put_u32(&b, TAG_EXIT_CODE, 0) == 0)
        (void)exchange_send_tlv(x, VHPC_EXIT, &b);
}

static short connecting_want(struct source *s)
{
    (void)s;
    return POLLOUT;
}

static void connecting_ready(struct source *s, short revents)
{
    struct link *l = s->owner;
    int number = 0, on = 1, fd = s->fd;
    socklen_t len = sizeof number;
    (void)revents;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &number, &len) < 0 || number != 0) {
        fail(l, number != 0 ? number : errno);
        return;
    }
    loop_remove(l->exchange.loop, s);
    s->fd = -1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    int rc = exchange_connect(&l->exchange, 0, fd);
    if (rc < 0) {
        fail(l, -rc);
        return;
    }
    (void)exchange_send(&l->exchange, VHPC_STARTED, 0, 0, NULL, 0);
    l->exchange.live = true;
}

int link_open(struct link *l, const struct link_server *server, struct loop *loop,
              struct chan *chan, uint32_t call, const struct flow *flow)
{
    *l = (struct link){.server = server, .deadline = now_ms() + CONNECT_MS};
    exchange_init(&l->exchange, FLOW_EXECUTOR, loop, chan, 0, call);
    l->exchange.flow = *flow;
    l->exchange.owner = l;
    l->exchange.changed = changed;
    int fd = socket(server->at.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    l->connecting =
        (struct source){.fd = fd, .want = connecting_want, .ready = connecting_ready, .owner = l};
    if (fd < 0)
        fail(l, errno);
    else if (connect(fd, &server->at.any, server->len) < 0 && errno != EINPROGRESS)
        fail(l, errno);
    else if (loop_add(loop, &l->connecting) < 0)
        fail(l, ENOMEM);
    return chan->closed ? -ENOTCONN : 0;
}

int link_frame(struct link *l, const struct frame *f)
{
    int rc = exchange_receive(&l->exchange, f);
    if (rc != 1 || f->type != VHPC_CLOSE)
        return rc < 0 ? rc : 0;
    l->over = true;
    stop_connecting(l);
    exchange_close(&l->exchange);
    return 0;
}

void link_tick(struct link *l, long long now)
{
    if (l->connecting.fd >= 0 && now > l->deadline)
        fail(l, ETIMEDOUT);
}
