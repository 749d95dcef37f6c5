/* SPDX-License-Identifier: Apache-2.0 */
/* The sessions that exist, by their number. */
#include <stdlib.h>

#include "agent.h"

struct session *session_find(const struct agent *a, uint32_t id)
{
    for (struct session *s = a->sessions; s != NULL; s = s->next)
        if (s->id == id && !s->closed && !s->task.detached)
            return s;
    return NULL;
}

struct session *session_numbered(const struct agent *a, uint32_t number)
{
    for (struct session *s = a->sessions; s != NULL; s = s->next)
        if (s->number == number && !s->closed)
            return s;
    return NULL;
}

struct session *session_add(struct agent *a, uint32_t id)
{
    size_t count = 0;
    for (struct session *s = a->sessions; s != NULL; s = s->next)
        count++;
    /* Closed ones still wait for their last process, so some more than the host may open. */
    struct session *s = count < (size_t)2 * VHPC_CLIENTS_MAX ? calloc(1, sizeof *s) : NULL;
    if (s == NULL)
        return NULL;
    s->agent = a;
    s->id = id;
    s->number = ++a->last_session;
    s->pmi = (struct session_pmi){.source.fd = -1, .child = -1, .listener.fd = -1};
    s->next = a->sessions;
    a->sessions = s;
    return s;
}
