/* SPDX-License-Identifier: Apache-2.0 */
#include "steps.h"

#include <stdio.h>

#include "again.h"
#include "pmix.h"
#include "x11.h"
#include "tlv.h"

static const char *clause(const struct session *s)
{
    const struct exchange *x = &s->task.exchange;
    if (x->flow.phase != FLOW_RUNNING)
        return "starts";
    if (s->spec.tty)
        return "has a terminal";
    const char *pmi = pmirecord_obstacle(&s->pmi.record);
    pmi = pmi != NULL ? pmi : pmix_obstacle(s);
    if (pmi != NULL)
        return pmi;
    for (size_t i = 0; i < VHPC_FDS_MAX; i++)
        if (i != s->pmi.number && x->outlet[i].open && !x->outlet[i].eof)
            return "reads an input that has not ended";
    return x11_is_used(s) ? "has a connection to the node's X11 server" : NULL;
}

bool step_obstacle(const struct session *s, char *why, size_t size)
{
    const char *what = s->task.reaped ? NULL : clause(s);
    if (what != NULL)
        (void)snprintf(why, size, "step %.40s %s", s->spec.step != NULL ? s->spec.step : "?", what);
    return what != NULL;
}

bool session_is_settled(struct session *s)
{
    bool settled = true;
    for (int i = 0; i < VHPC_FDS_MAX; i++)
        if (!flow_settled(&s->task.exchange.flow, (uint8_t)i)) {
            settled = false;
            (void)exchange_send(&s->task.exchange, VHPC_SYNC, (uint8_t)i, 0, NULL, 0);
        }
    return settled;
}

/* For the host the task ends with status 0, so that srun has nothing to say. */
static void detach(struct session *s)
{
    struct buf b = {0};
    (void)tlv_put_u32(&b, TAG_EXIT_CODE, 0);
    (void)exchange_send_tlv(&s->task.exchange, VHPC_EXIT, &b);
    s->task.detached = true;
    s->id = 0;
}

static void put_away(struct session *s, char *why, size_t size)
{
    (void)snprintf(why, size, "step %.40s does not stop",
                   s->spec.step != NULL ? s->spec.step : "?");
    if (s->task.reaped) { /* it ends by itself, when its output is sent */
        (void)session_park(s, false);
        return;
    }
    if (s->parked) {
        if (cgroup_is_frozen(s->agent, s->number) && session_is_settled(s) && pmix_leave(s))
            detach(s);
        return;
    }
    if (step_obstacle(s, why, size) || !again_are_suspended(s->agent, s, why, size))
        return;
    if (!session_park(s, true))
        (void)snprintf(why, size, "the guest's kernel cannot freeze cgroups");
}

bool steps_put_away(struct agent *a, char *why, size_t size)
{
    bool away = true;
    for (struct session *s = a->sessions; s != NULL; s = s->next) {
        if (s->mark.guest == 0 || !s->started || s->task.detached || s->task.finished || s->closed)
            continue;
        put_away(s, why, size);
        away = away && s->task.detached;
    }
    return away;
}
