/* SPDX-License-Identifier: Apache-2.0 */
#include "pmi_repeat.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tlv.h"

static void stop(struct pmi_repeat *r)
{
    loop_remove(&r->front->loop, &r->server);
    (void)close(r->server.fd);
    buf_free(&r->requests);
    buf_free(&r->answer);
    if (r->waits != NULL)
        *r->waits = false;
    front_wait(r->front, false);
}

static void fail(struct pmi_repeat *r, const char *why)
{
    char text[512];
    (void)snprintf(text, sizeof text,
                   "the MPI program cannot continue in this step: its PMI server %s", why);
    stop(r);
    /* ECANCELED: the other tasks may wait for this one. */
    front_give_up(r->front, FRONT_REFUSED, ECANCELED, text);
}

/* The next request, or the end. */
static void tell(struct pmi_repeat *r)
{
    long len = pmi_first(buf_head(&r->requests), r->requests.len, r->fields, PMI_MESSAGE_MAX);
    if (r->requests.len == 0) {
        stop(r);
        return;
    }
    r->asked = len > 0 ? (size_t)len : 0;
    if (len <= 0 || send(r->server.fd, buf_head(&r->requests), r->asked, MSG_NOSIGNAL) != len)
        fail(r, "takes no message");
}

static bool is_good(const struct pmi_message *m)
{
    return pmi_has(m, "rc=0") || pmi_is(m, "barrier_out");
}

static void take_answer(struct pmi_repeat *r, const struct pmi_message *m)
{
    struct buf none = {0};
    const struct pmi_message asked = {
        .text = (const char *)buf_head(&r->requests), .len = r->asked, .fields = r->fields};
    int rc = r->filter != NULL ? pmi_filter(r->filter, (const uint8_t *)m->text, m->len, &none) : 0;
    buf_free(&none);
    if (rc < 0 || !is_good(m)) {
        char why[300];
        (void)snprintf(why, sizeof why, "says: %.*s", (int)(m->len < 200 ? m->len : 200), m->text);
        why[strcspn(why, "\n")] = '\0';
        fail(r, why);
        return;
    }
    r->fields = pmi_is(&asked, "init") ? pmi_begins_2(&asked) : r->fields;
    buf_consume(&r->requests, asked.len);
    buf_consume(&r->answer, m->len);
    tell(r);
}

static short server_want(struct source *s)
{
    (void)s;
    return POLLIN;
}

static void server_ready(struct source *s, short revents)
{
    struct pmi_repeat *r = s->owner;
    uint8_t part[4096];
    (void)revents;
    ssize_t n = read(s->fd, part, sizeof part);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0 || buf_append(&r->answer, part, (size_t)n) < 0) {
        fail(r, "has ended");
        return;
    }
    struct pmi_message m = {.text = (const char *)buf_head(&r->answer), .fields = r->fields};
    long len = pmi_first(m.text, r->answer.len, m.fields, PMI_MESSAGE_MAX);
    if (len < 0) {
        fail(r, "answers in another way than before");
    } else if (len > 0) {
        m.len = (size_t)len;
        take_answer(r, &m);
    }
}

int pmi_repeat(struct pmi_repeat *r, struct front *f, int server, const struct frame *started)
{
    struct tlv told;
    if (!tlv_find(started->payload, started->length, TAG_PMI_TOLD, &told))
        return 0;
    int rc = buf_append(&r->requests, told.data, told.len);
    int fd = server >= 0 && rc == 0 ? fcntl(server, F_DUPFD_CLOEXEC, 0) : -1;
    if (rc == 0 && fd < 0)
        rc = server < 0 ? -ENOTCONN : -errno;
    r->front = f;
    r->server = (struct source){.fd = fd, .want = server_want, .ready = server_ready, .owner = r};
    rc = rc < 0 ? rc : loop_add(&f->loop, &r->server);
    if (rc < 0) {
        buf_free(&r->requests);
        if (fd >= 0)
            (void)close(fd);
        return rc;
    }
    if (r->waits != NULL)
        *r->waits = true;
    front_wait(f, true);
    tell(r);
    return 0;
}
