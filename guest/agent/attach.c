/* SPDX-License-Identifier: Apache-2.0 */
/* A client takes over a program whose own client is gone: that of a guest that was saved. */
#include <errno.h>
#include <string.h>

#include "again.h"
#include "pmix.h"
#include "resumed.h"
#include "tlv.h"

static struct session *find_detached(const struct agent *a, const char *step)
{
    for (struct session *s = a->sessions; s != NULL; s = s->next)
        if (s->task.detached && !s->closed && s->spec.step != NULL &&
            strcmp(s->spec.step, step) == 0)
            return s;
    return NULL;
}

static int refuse(struct session *s, int number, const char *text)
{
    struct frame f = {.type = VHPC_ERROR};
    (void)flow_check(&s->flow, FLOW_EXECUTOR, &f);
    return error_send(&s->agent->host, s->id, 0, VHPC_ERR_REFUSED, number, text);
}

static bool is_same(const struct session *s, const struct session *there)
{
    return there->spec.uid == s->spec.uid &&
           memcmp(there->spec.fd_dir, s->spec.fd_dir, sizeof s->spec.fd_dir) == 0;
}

static int take_over(struct session *s, struct session *there)
{
    struct agent *a = s->agent;
    int rc = 0;
    if (!is_same(s, there))
        return refuse(s, EINVAL, "the program in the guest has another user or other streams");
    /* Of a step's tasks only the steps differ, not the job. */
    if (s->spec.attach != NULL && a->system)
        rc = resumed_write(RESUMED_FILE, &there->spec, &s->spec);
    if (rc < 0)
        return refuse(s, -rc, "couldn't write the job's variables in the guest");
    rc = again_renew(there, &s->spec);
    if (rc < 0)
        return rc;
    there->id = s->id;
    s->id = 0; /* of this session nothing is left */
    s->closed = true;
    execspec_free(&there->now);
    there->now = s->spec;
    s->spec = (struct execspec){0};
    if (there->now.step != NULL) { /* a step that is issued again has another number */
        char *step = there->spec.step;
        there->spec.step = there->now.step;
        there->now.step = step;
    }
    rc = task_attach(&there->task, there->id, &s->flow);
    /* During a hold it is only there to be detached again. */
    there->frozen = there->halted = false;
    (void)session_park(there, a->hold.phase >= HOLD_STEPS);
    pmix_renew(there);
    return rc < 0 ? rc : again_issue_all(a);
}

int session_attach(struct session *s)
{
    struct session *there = find_detached(s->agent, s->spec.attach);
    if (there == NULL)
        return refuse(s, ENOENT, "the guest has no program that waits to be attached");
    return take_over(s, there);
}

/* --- tasks of an srun that was issued again ---------------------------------------------- */

static struct session *find_task(const struct session *s)
{
    for (struct session *o = s->agent->sessions; o != NULL; o = o->next)
        if (o != s && o->task.detached && !o->closed && step_mark_same_task(&o->mark, &s->mark))
            return o;
    return NULL;
}

/* The other tasks' fence in the new PMI server waits for this task too. */
static int put_fence(struct buf *started, const struct step_mark *task)
{
    static const char *const told[] = {
        [STEP_FENCES_PMI_1] = "cmd=init pmi_version=1 pmi_subversion=1\ncmd=barrier_in\n",
        [STEP_FENCES_PMI_2] = "cmd=init pmi_version=2 pmi_subversion=0\n    14cmd=kvs-fence;",
    };
    return task->fences != STEP_FENCES_NONE ? tlv_put_str(started, TAG_PMI_TOLD, told[task->fences])
                                            : 0;
}

/* A session without a program, because the task has ended: it starts and ends, with status 0. */
static int end_at_once(struct session *s, const struct step_mark *task)
{
    struct exchange x;
    struct buf started = {0}, ended = {0};
    exchange_init(&x, FLOW_EXECUTOR, &s->agent->loop, &s->agent->host, s->id, 0);
    x.flow = s->flow;
    int rc = tlv_put_u32(&started, TAG_PID, 1);
    if (rc == 0 && s->spec.pmi_refusal != NULL)
        rc = tlv_put_u32(&started, TAG_PMI_REFUSAL, 1);
    rc = rc < 0 ? rc : put_fence(&started, task);
    rc = rc < 0 ? rc : exchange_send_tlv(&x, VHPC_STARTED, &started);
    rc = rc < 0 ? rc : tlv_put_u32(&ended, TAG_EXIT_CODE, 0);
    rc = rc < 0 ? rc : exchange_send_tlv(&x, VHPC_EXIT, &ended);
    s->flow = x.flow;
    return rc;
}

int session_take_task(struct session *s)
{
    struct agent *a = s->agent;
    if (s->mark.guest == 0)
        return 0;
    const struct step_mark *task = step_tasks_find(&a->tasks, &s->mark);
    if (!s->mark.take_over)
        return task != NULL ? 0 : step_tasks_add(&a->tasks, &s->mark);
    struct session *there = find_task(s);
    int rc;
    if (there != NULL)
        rc = take_over(s, there);
    else if (task != NULL)
        rc = end_at_once(s, task);
    else
        rc = refuse(s, ENOENT, "this task did not run in this guest before the checkpoint");
    return rc < 0 ? rc : 1;
}
