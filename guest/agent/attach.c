/* SPDX-License-Identifier: Apache-2.0 */
/* A client takes over a program whose own client is gone: that of a guest that was saved. */
#include <errno.h>
#include <string.h>

#include "agent.h"
#include "resumed.h"

static struct session *find_detached(const struct agent *a, const char *step)
{
    for (struct session *s = a->sessions; s != NULL; s = s->next)
        if (s->task.detached && !s->closed && strcmp(s->spec.step, step) == 0)
            return s;
    return NULL;
}

static int refuse(struct session *s, int number, const char *text)
{
    struct frame f = {.type = VHPC_ERROR};
    (void)flow_check(&s->flow, FLOW_EXECUTOR, &f);
    return error_send(&s->agent->host, s->id, 0, VHPC_ERR_REFUSED, number, text);
}

int session_attach(struct session *s)
{
    struct session *there = find_detached(s->agent, s->spec.attach);
    if (there == NULL)
        return refuse(s, ENOENT, "the guest has no program that waits to be attached");
    if (there->spec.uid != s->spec.uid ||
        memcmp(there->spec.fd_dir, s->spec.fd_dir, sizeof s->spec.fd_dir) != 0)
        return refuse(s, EINVAL, "the program in the guest has another user or other streams");
    int rc = there->agent->system ? resumed_write(RESUMED_FILE, &there->spec, &s->spec) : 0;
    if (rc < 0)
        return refuse(s, -rc, "couldn't write the job's variables in the guest");
    there->id = s->id;
    s->id = 0; /* of this session nothing is left */
    s->closed = true;
    rc = task_attach(&there->task, there->id, &s->flow);
    there->parked = there->frozen = there->halted = false;
    (void)session_freeze(there);
    return rc;
}
