/* SPDX-License-Identifier: Apache-2.0 */
#include "pmix.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hello.h"
#include "tlv.h"

enum { CONNECT_MS = 10000 };

/* --- the address ---------------------------------------------------------------- */

static bool parse_port(const char *text, in_port_t *port)
{
    size_t digits = strspn(text, "0123456789");
    unsigned long value = digits > 0 && digits < 6 ? strtoul(text, NULL, 10) : 0;
    *port = htons((uint16_t)value);
    return text[digits] == '\0' && value > 0 && value <= UINT16_MAX;
}

/* "tcp4://127.0.0.1:PORT" or "tcp6://[::1]:PORT" */
static bool parse_address(const char *text, struct pmix_server *server)
{
    static const char v4[] = "tcp4://", v6[] = "tcp6://[::1]:";
    char host[INET_ADDRSTRLEN];
    *server = (struct pmix_server){0};
    if (strncmp(text, v6, sizeof v6 - 1) == 0) {
        server->at.in6.sin6_family = AF_INET6;
        server->at.in6.sin6_addr = in6addr_loopback;
        server->len = sizeof server->at.in6;
        return parse_port(text + sizeof v6 - 1, &server->at.in6.sin6_port);
    }
    if (strncmp(text, v4, sizeof v4 - 1) != 0)
        return false;
    text += sizeof v4 - 1;
    size_t len = strcspn(text, ":");
    if (text[len] != ':' || len >= sizeof host)
        return false;
    memcpy(host, text, len);
    host[len] = '\0';
    server->at.in.sin_family = AF_INET;
    server->len = sizeof server->at.in;
    return inet_pton(AF_INET, host, &server->at.in.sin_addr) == 1 &&
           ntohl(server->at.in.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET &&
           parse_port(text + len + 1, &server->at.in.sin_port);
}

/* Both are of the loopback interface. */
static bool same(const struct pmix_server *a, const struct pmix_server *b)
{
    if (a->at.any.sa_family != b->at.any.sa_family)
        return false;
    if (a->at.any.sa_family == AF_INET6)
        return a->at.in6.sin6_port == b->at.in6.sin6_port;
    return a->at.in.sin_port == b->at.in.sin_port &&
           a->at.in.sin_addr.s_addr == b->at.in.sin_addr.s_addr;
}

bool pmix_find(const struct execspec *spec, struct pmix_server *server)
{
    static const char name[] = "PMIX_SERVER_URI";
    struct pmix_server found;
    *server = (struct pmix_server){0};
    for (size_t i = 0; i < spec->envc; i++) {
        const char *value = strchr(spec->envp[i], '='), *address;
        if (value == NULL || strncmp(spec->envp[i], name, sizeof name - 1) != 0)
            continue;
        address = strchr(value, ';');
        if (address == NULL || !parse_address(address + 1, &found))
            return false;
        if (server->len != 0 && !same(&found, server))
            return false;
        *server = found;
    }
    return server->len != 0;
}

/* --- a connection --------------------------------------------------------------- */

static void stop_connecting(struct pmix_link *l)
{
    if (l->connecting.fd < 0)
        return;
    loop_remove(l->exchange.loop, &l->connecting);
    (void)close(l->connecting.fd);
    l->connecting.fd = -1;
}

static void fail(struct pmix_link *l, int number)
{
    struct frame f = {.type = VHPC_ERROR};
    char text[128];
    (void)snprintf(text, sizeof text, "the PMIx server of the step does not answer: %s",
                   strerror(number));
    stop_connecting(l);
    if (flow_check(&l->exchange.flow, FLOW_EXECUTOR, &f) == FLOW_PASS)
        (void)error_send(l->exchange.chan, 0, l->exchange.call, VHPC_ERR_INTERNAL, number, text);
    exchange_close(&l->exchange);
    l->over = true;
}

/* When both directions have ended, the call has. */
static void changed(struct exchange *x)
{
    struct pmix_link *l = x->owner;
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
    struct pmix_link *l = s->owner;
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

int pmix_open(struct pmix_link *l, const struct pmix_server *server, struct loop *loop,
              struct chan *chan, uint32_t call, const struct flow *flow)
{
    *l = (struct pmix_link){.deadline = now_ms() + CONNECT_MS};
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

int pmix_frame(struct pmix_link *l, const struct frame *f)
{
    int rc = exchange_receive(&l->exchange, f);
    if (rc != 1 || f->type != VHPC_CLOSE)
        return rc < 0 ? rc : 0;
    l->over = true;
    stop_connecting(l);
    exchange_close(&l->exchange);
    return 0;
}

void pmix_tick(struct pmix_link *l, long long now)
{
    if (l->connecting.fd >= 0 && now > l->deadline)
        fail(l, ETIMEDOUT);
}
