/* SPDX-License-Identifier: Apache-2.0 */
#include "reach.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/icmp6.h>
#include <netinet/ip_icmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "reply.h"
#include "tlv.h"

enum {
    V4 = 0,
    V6 = 1,
    ECHO_HEADER = 8,
    IPV4_HEADER = 20,
    IPV6_HEADER = 40,
    SOCKET_BUFFER = 1 << 20, /* bytes; for answers to requests of 64 KiB */
    ANSWERS_MAX = 64,        /* taken in one turn of the loop */
};

/* ICMP and ICMPv6 have the same header of echo messages. */
struct echo {
    uint8_t type;
    uint8_t code;
    uint16_t checksum; /* by the kernel */
    uint16_t id;       /* by the kernel */
    uint16_t sequence;
};

int reach_parse(const struct reach_want *want, struct reach *r, char *text, size_t size)
{
    if (want->count == 0 || want->size < REACH_SIZE_MIN || want->size > REACH_SIZE_MAX ||
        want->wait_ms > REACH_WAIT_MAX_MS) {
        (void)snprintf(text, size,
                       "the request needs TARGET, MTU from 1280 to 65535 and WAIT_MS of at most "
                       "600000");
        return -EINVAL;
    }
    r->size = want->size;
    for (size_t i = 0; i < want->count; i++) {
        struct reach_target *t = &r->target[i];
        *t = (struct reach_target){0};
        (void)snprintf(t->name, sizeof t->name, "%s", want->target[i]);
        if (inet_pton(AF_INET, t->name, &t->address.in.sin_addr) == 1) {
            t->family = t->address.in.sin_family = AF_INET;
        } else if (inet_pton(AF_INET6, t->name, &t->address.in6.sin6_addr) == 1) {
            t->family = t->address.in6.sin6_family = AF_INET6;
        } else {
            (void)snprintf(text, size, "TARGET is not an address");
            return -EINVAL;
        }
    }
    r->count = want->count;
    return 0;
}

/* A socket that only sends echo requests and only receives the answers to them (icmp(7)). */
static int open_socket(int family)
{
    static const int buffer = SOCKET_BUFFER;
    int probe = family == AF_INET ? IP_PMTUDISC_PROBE : IPV6_PMTUDISC_PROBE;
    int fd = socket(family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK,
                    family == AF_INET ? (int)IPPROTO_ICMP : (int)IPPROTO_ICMPV6);
    if (fd < 0)
        return -errno;
    /* No fragments, whatever the kernel knows about the path. */
    int rc = family == AF_INET
                 ? setsockopt(fd, IPPROTO_IP, IP_MTU_DISCOVER, &probe, sizeof probe)
                 : setsockopt(fd, IPPROTO_IPV6, IPV6_MTU_DISCOVER, &probe, sizeof probe);
    rc = rc < 0 ? -errno : 0;
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
    if (rc == 0)
        return fd;
    (void)close(fd);
    return rc;
}

int reach_open(struct reach *r, char *text, size_t size)
{
    r->source[V4].fd = r->source[V6].fd = -1;
    for (size_t i = 0; i < r->count; i++) {
        struct source *source = &r->source[r->target[i].family == AF_INET ? V4 : V6];
        if (source->fd >= 0)
            continue;
        source->fd = open_socket(r->target[i].family);
        if (source->fd < 0) {
            int rc = source->fd;
            source->fd = -1;
            reach_close(r, NULL);
            (void)snprintf(text, size, "cannot open a socket for echo requests: %s", strerror(-rc));
            return rc;
        }
    }
    return 0;
}

void reach_close(struct reach *r, struct loop *l)
{
    for (size_t i = 0; i < 2; i++) {
        if (l != NULL)
            loop_remove(l, &r->source[i]);
        if (r->source[i].fd >= 0)
            (void)close(r->source[i].fd);
        r->source[i].fd = -1;
    }
}

/* Bytes of an echo message, header included, in an IP packet of r->size bytes. */
static size_t message_size(const struct reach *r, int family)
{
    return r->size - (family == AF_INET ? IPV4_HEADER : IPV6_HEADER);
}

void reach_send(struct reach *r)
{
    static uint8_t message[REACH_SIZE_MAX];
    r->sequence++;
    for (size_t i = 0; i < r->count; i++) {
        struct reach_target *t = &r->target[i];
        bool v4 = t->family == AF_INET;
        struct echo head = {.type = v4 ? ICMP_ECHO : ICMP6_ECHO_REQUEST,
                            .sequence = htons(r->sequence)};
        if (t->answered)
            continue;
        memcpy(message, &head, sizeof head);
        ssize_t n = sendto(r->source[v4 ? V4 : V6].fd, message, message_size(r, t->family), 0,
                           &t->address.any, v4 ? sizeof t->address.in : sizeof t->address.in6);
        t->error = n < 0 ? errno : 0;
    }
}

static bool is_from(const struct reach_target *t, const struct sockaddr_in6 *from)
{
    struct sockaddr_in in;
    if (from->sin6_family != t->family)
        return false;
    if (t->family == AF_INET6)
        return memcmp(&from->sin6_addr, &t->address.in6.sin6_addr, sizeof from->sin6_addr) == 0;
    memcpy(&in, from, sizeof in);
    return in.sin_addr.s_addr == t->address.in.sin_addr.s_addr;
}

void reach_receive(struct reach *r, size_t which)
{
    static uint8_t answer[REACH_SIZE_MAX]; /* these sockets do not report a length that they cut */
    for (int i = 0; i < ANSWERS_MAX; i++) {
        struct sockaddr_in6 from = {0}; /* large enough for both */
        socklen_t len = sizeof from;
        ssize_t n =
            recvfrom(r->source[which].fd, answer, sizeof answer, 0, (struct sockaddr *)&from, &len);
        if (n < 0 && errno == EAGAIN)
            return;
        /* Other errors report that a request was not delivered: an answer may follow. */
        for (size_t k = 0; n >= ECHO_HEADER && k < r->count; k++)
            if (is_from(&r->target[k], &from) && (size_t)n == message_size(r, r->target[k].family))
                r->target[k].answered = true;
    }
}

bool reach_complete(const struct reach *r)
{
    for (size_t i = 0; i < r->count; i++)
        if (!r->target[i].answered)
            return false;
    return true;
}

void reach_describe(const struct reach *r, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < r->count && used < size; i++) {
        const struct reach_target *t = &r->target[i];
        if (t->answered)
            continue;
        int n = snprintf(text + used, size - used, "%s%s: %s", used > 0 ? ", " : "", t->name,
                         t->error != 0 ? strerror(t->error) : "no answer");
        used += n > 0 ? (size_t)n : 0;
    }
}

static short want_answers(struct source *s)
{
    (void)s;
    return POLLIN;
}

static void answers_ready(struct source *source, short revents)
{
    struct reach *r = source->owner;
    (void)revents;
    reach_receive(r, source == &r->source[V4] ? V4 : V6);
}

static int watch(struct agent *a, struct reach *r)
{
    for (size_t i = 0; i < 2; i++) {
        struct source *source = &r->source[i];
        if (source->fd < 0)
            continue;
        source->want = want_answers;
        source->ready = answers_ready;
        source->owner = r;
        if (loop_add(&a->loop, source) < 0)
            return -ENOMEM;
    }
    return 0;
}

static void give_up(struct agent *a)
{
    reach_close(a->reach, &a->loop);
    free(a->reach);
    a->reach = NULL;
}

int reach_ask(struct session *s, uint32_t request, const struct reach_want *want, char *text,
              size_t size)
{
    struct agent *a = s->agent;
    struct reach *r = calloc(1, sizeof *r);
    if (r == NULL)
        return -ENOMEM;
    int rc = reach_parse(want, r, text, size);
    if (rc == 0 && a->reach != NULL) {
        (void)snprintf(text, size, "another reach request is still waiting for answers");
        rc = -EBUSY;
    }
    /* In tests, targets count as reached. */
    for (size_t i = 0; !a->system && i < r->count; i++)
        r->target[i].answered = true;
    r->source[V4].fd = r->source[V6].fd = -1;
    if (rc == 0 && a->system)
        rc = reach_open(r, text, size);
    if (rc < 0) {
        free(r);
        return rc;
    }
    r->session = s->id;
    r->request = request;
    r->until = now_ms() + want->wait_ms;
    a->reach = r;
    rc = watch(a, r);
    if (rc < 0)
        give_up(a);
    return rc;
}

void reach_forget(struct agent *a, const struct session *s)
{
    if (a->reach != NULL && a->reach->session == s->id)
        give_up(a);
}

static int put_unanswered(const struct reach *r, struct buf *b)
{
    int rc = 0;
    for (size_t i = 0; i < r->count && rc == 0; i++)
        if (!r->target[i].answered)
            rc = tlv_put_str(b, TAG_TARGET, r->target[i].name);
    return rc;
}

int reach_tick(struct agent *a, long long now, bool *work)
{
    struct reach *r = a->reach;
    struct buf b = {0};
    char text[1024] = "";
    if (r == NULL)
        return 0;
    bool complete = reach_complete(r);
    if (!complete && now < r->until) {
        *work = true;
        if (now >= r->next) {
            reach_send(r);
            r->next = now + REACH_AGAIN_MS;
        }
        return 0;
    }
    if (!complete)
        reach_describe(r, text, sizeof text);
    int rc = put_unanswered(r, &b);
    if (rc == 0)
        rc = reply_send(a, r->session, r->request, 0, text, &b);
    buf_free(&b);
    give_up(a);
    return rc;
}
