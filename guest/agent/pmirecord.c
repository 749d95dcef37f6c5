/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: A program's PMI requests are repeated to the next step's server */
#include "pmirecord.h"

#include <string.h>

static bool is_one_of(const struct pmi_message *m, const char *const *names)
{
    for (; *names != NULL; names++)
        if (pmi_is(m, *names))
            return true;
    return false;
}

static void lose(struct pmirecord *r, const char *why)
{
    pmirecord_free(r);
    r->lost = why;
}

static void forget_fence(struct pmirecord *r)
{
    struct buf *b = &r->kept;
    size_t rest = b->len - r->fence - r->fence_len;
    memmove(b->data + b->head + r->fence, b->data + b->head + r->fence + r->fence_len, rest);
    b->len -= r->fence_len;
}

static void keep(struct pmirecord *r, const struct pmi_message *m)
{
    if (r->kept.len + m->len > PMIRECORD_MAX)
        lose(r, "has told its PMI server more than a checkpoint keeps");
    else if (buf_append(&r->kept, m->text, m->len) < 0)
        lose(r, "has told its PMI server more than the guest's memory holds");
}

static void take_request(struct pmirecord *r, const struct pmi_message *m)
{
    static const char *const told[] = {"init",     "fullinit", "put", "kvs-put", "info-putnodeattr",
                                       "finalize", NULL};
    static const char *const fences[] = {"barrier_in", "kvs-fence", NULL};
    static const char *const between_jobs[] = {
        "publish_name", "unpublish_name", "name-publish", "name-unpublish",
        "job-connect",  "job-disconnect", "spawn",        NULL};
    if (pmi_is(m, "init"))
        r->program.fields = pmi_begins_2(m);
    if (is_one_of(m, between_jobs)) {
        lose(r, "has published a name, or connects to another MPI program");
    } else if (is_one_of(m, fences)) {
        if (r->fence_len > 0)
            forget_fence(r);
        r->fence = r->kept.len;
        r->fence_len = m->len;
        keep(r, m);
    } else if (is_one_of(m, told)) {
        keep(r, m);
    }
}

static void take_answer(struct pmirecord *r, const struct pmi_message *m)
{
    if (!pmi_is(m, "response_to_init"))
        return;
    r->server.fields = pmi_begins_2(m);
    if (!pmi_has(m, "rc=0") || r->server.fields != r->program.fields)
        lose(r, "and its PMI server have different versions");
}

static void take(struct pmirecord *r, struct pmirecord_side *side, const uint8_t *data, size_t len,
                 void (*message)(struct pmirecord *, const struct pmi_message *))
{
    if (r->lost != NULL)
        return;
    if (buf_append(&side->part, data, len) < 0) {
        lose(r, "has told its PMI server more than the guest's memory holds");
        return;
    }
    while (r->lost == NULL && side->part.len > 0) {
        struct pmi_message m = {.text = (const char *)buf_head(&side->part),
                                .fields = side->fields};
        long first = pmi_first(m.text, side->part.len, m.fields, PMIRECORD_MESSAGE_MAX);
        if (first == 0)
            return;
        if (first < 0) {
            lose(r, "uses PMI in a way that a checkpoint does not know");
            return;
        }
        m.len = (size_t)first;
        side->count++;
        message(r, &m);
        if (r->lost == NULL)
            buf_consume(&side->part, m.len);
    }
}

void pmirecord_program(struct pmirecord *r, const uint8_t *data, size_t len)
{
    take(r, &r->program, data, len, take_request);
}

void pmirecord_server(struct pmirecord *r, const uint8_t *data, size_t len)
{
    take(r, &r->server, data, len, take_answer);
}

const char *pmirecord_obstacle(const struct pmirecord *r)
{
    if (r->lost != NULL)
        return r->lost;
    bool waits =
        r->program.count != r->server.count || r->program.part.len > 0 || r->server.part.len > 0;
    return waits ? "waits for an answer of its PMI server" : NULL;
}

void pmirecord_free(struct pmirecord *r)
{
    buf_free(&r->program.part);
    buf_free(&r->server.part);
    buf_free(&r->kept);
    r->fence = r->fence_len = 0;
}
