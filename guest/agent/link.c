/* SPDX-License-Identifier: Apache-2.0 */
#include "link.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

static void end_link(struct link *l)
{
    exchange_close(&l->exchange);
    l->session->links--;
    l->session = NULL;
}

static void changed(struct exchange *x)
{
    struct link *l = x->owner;
    if (l->ended && !x->outlet[0].open)
        end_link(l);
}

/* Ask the host for a connection to the server. */
static int ask(struct link *l, const struct session *s)
{
    char *argv[] = {l->kind->call, NULL};
    struct execspec spec = {
        .fd_dir = {VHPC_FD_BOTH}, .uid = s->spec.uid, .gid = s->spec.gid, .argv = argv, .argc = 1};
    struct buf message = {0};
    int rc = execspec_encode(&spec, &message);
    if (rc == 0)
        rc = exchange_send_exec(&l->exchange, &message);
    buf_free(&message);
    return rc;
}

void link_open(struct session *s, int fd, const struct link_kind *kind)
{
    struct agent *a = s->agent;
    struct link *l = calloc(1, sizeof *l);
    int on = 1;
    if (l == NULL) {
        (void)close(fd);
        return;
    }
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    *l = (struct link){.next = a->links, .session = s, .kind = kind};
    a->links = l;
    s->links++;
    exchange_init(&l->exchange, FLOW_INITIATOR, &a->loop, &a->host, s->id, ++s->last_call);
    if (exchange_connect(&l->exchange, 0, fd) < 0 || ask(l, s) < 0) {
        end_link(l);
        return;
    }
    l->exchange.owner = l;
    l->exchange.changed = changed;
    l->exchange.pass = kind->pass;
}

static struct link *find(const struct session *s, uint32_t call)
{
    for (struct link *l = s->agent->links; l != NULL; l = l->next)
        if (l->session == s && l->exchange.call == call)
            return l;
    return NULL;
}

int link_frame(struct session *s, const struct frame *f)
{
    struct link *l = find(s, f->call);
    if (l == NULL)
        return 1;
    int rc = exchange_receive(&l->exchange, f);
    if (rc == -EPROTO)
        return chan_broken(&s->agent->host, l->exchange.flow.why);
    if (rc != 1)
        return rc;
    if (f->type == VHPC_STARTED) {
        l->exchange.live = true;
        return 0;
    }
    l->ended = true;
    if (f->type == VHPC_ERROR) {
        if (l->kind->failed != NULL)
            l->kind->failed(s, f);
        end_link(l);
    } else {
        changed(&l->exchange);
    }
    return 0;
}

uint32_t links_count(const struct session *s, const struct link_kind *kind)
{
    uint32_t count = 0;
    for (const struct link *l = s->agent->links; l != NULL; l = l->next)
        count += l->session == s && l->kind == kind ? 1 : 0;
    return count;
}

void links_close(const struct session *s)
{
    for (struct link *l = s->agent->links; l != NULL; l = l->next)
        if (l->session == s)
            end_link(l);
}

void links_sweep(struct agent *a)
{
    for (struct link **p = &a->links; *p != NULL;) {
        struct link *l = *p;
        if (l->session != NULL) {
            p = &l->next;
            continue;
        }
        *p = l->next;
        free(l);
    }
}
