/* SPDX-License-Identifier: Apache-2.0 */
/* Life of a session: EXEC, its task, its end. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "accounting.h"
#include "agent.h"
#include "cluster.h"
#include "hostfile.h"
#include "imageenv.h"
#include "locales.h"
#include "memory.h"
#include "network.h"
#include "reach.h"
#include "ssh.h"
#include "pmix.h"
#include "topology.h"
#include "fabric.h"
#include "link.h"
#include "locks.h"
#include "x11.h"

static int refuse(struct session *s, int number, const char *what)
{
    char text[256];
    struct frame f = {.type = VHPC_ERROR};
    (void)snprintf(text, sizeof text, "%s: %s", what, strerror(number));
    (void)flow_check(&s->flow, FLOW_EXECUTOR, &f);
    return error_send(&s->agent->host, s->id, 0, VHPC_ERR_INTERNAL, number, text);
}

int session_begin(struct session *s)
{
    char number[64];
    if (s->spec.attach != NULL)
        return session_attach(s);
    int rc = session_take_task(s);
    if (rc != 0)
        return rc < 0 ? rc : 0;
    execspec_drop_env(&s->spec, "VHPC_SESSION=");
    (void)snprintf(number, sizeof number, "VHPC_SESSION=%u.%d", s->number, (int)getpid());
    if (execspec_add_env(&s->spec, number) < 0 || memory_environment(s->agent, &s->spec) < 0)
        return -ENOMEM;
    if (s->agent->fabric != NULL && !s->agent->fabric->waiting &&
        fabric_environment(s->agent->fabric, &s->spec) < 0)
        return -ENOMEM;
    if (image_env_apply(s->agent->image_env, &s->spec) < 0 ||
        (s->agent->system && locales_replace_missing(&s->spec, LOCALES_FOLDER) < 0))
        return -ENOMEM;
    if (topology_environment(s->agent, &s->spec) < 0 ||
        network_environment(s->agent, &s->spec) < 0 ||
        hostfile_environment(s->agent, &s->spec) < 0 || cluster_environment(s->agent, &s->spec) < 0)
        return -ENOMEM;
    if (environment_start(s) < 0 || x11_listen(s) < 0)
        return -ENOMEM;
    s->pmi.judged = s->spec.pmi_refusal != NULL;
    rc = pmi_guard(s);
    if (rc < 0)
        return refuse(s, -rc, "couldn't watch for PMI, see VHPC_PMI in vhpc-spank(8)");
    rc = script_write(&s->spec, &s->script_written);
    if (rc < 0)
        return refuse(s, -rc, "couldn't write the batch script in the guest");
    s->cgroup_made = cgroup_make(s->agent, s->number, s->spec.uid, s->spec.gid) == 0;
    s->started = true;
    rc = task_start(&s->task, &session_ops, s, &s->agent->loop, &s->agent->host, s->id, 0, &s->flow,
                    &s->spec);
    pmi_started(s);
    pmi_watch(s);
    return rc;
}

/* Whether the task's srun was issued before its guest began the present hold. */
static bool is_older(const struct session *s)
{
    return s->mark.guest != 0 && s->mark.hold < s->agent->hold.serial;
}

int session_exec(struct session *s, const struct frame *f)
{
    if (s->started) {
        int rc = task_frame(&s->task, f);
        return rc == -EPROTO ? chan_broken(&s->agent->host, s->task.exchange.flow.why) : rc;
    }
    switch (flow_check(&s->flow, FLOW_INITIATOR, f)) {
    case FLOW_DROP:
        return 0;
    case FLOW_BROKEN:
        return chan_broken(&s->agent->host, s->flow.why);
    case FLOW_PASS:
        break;
    }
    if (f->type != VHPC_EXEC)
        return 0;
    int rc = message_add(&s->exec, f);
    if (rc != 1)
        return rc < 0 ? rc : 0;
    rc = execspec_decode(buf_head(&s->exec.data), s->exec.data.len, &s->spec);
    message_reset(&s->exec);
    if (rc < 0)
        return rc == -EPROTO ? refuse(s, EBADMSG, "malformed EXEC") : rc;
    s->mark = step_mark_take(&s->spec);
    s->waiting = hold_is_quiet(s->agent) && !is_older(s);
    return s->waiting ? 0 : session_begin(s);
}

/* Of the programs' connections, and of what they can connect to. */
static void end_relays(struct session *s)
{
    pmix_close(s);
    x11_close(s);
    links_close(s);
}

void session_close(struct session *s)
{
    if (s->closed)
        return;
    s->closed = true;
    callers_close(s->agent, s);
    end_relays(s);
    fabric_forget(s->agent, s);
    reach_forget(s->agent, s);
    s->agent->hold.left = s->agent->hold.left || s->agent->hold.session == s->id;
    if (s->started)
        task_abort(&s->task);
}

void sessions_reap(struct agent *a)
{
    int status;
    struct rusage used;
    for (pid_t pid; (pid = wait4(-1, &status, WNOHANG, &used)) > 0;) {
        ssh_reaped(a, pid);
        gpus_reaped(&a->gpus, pid, status);
        locks_reaped(a, pid);
        for (struct session *s = a->sessions; s != NULL; s = s->next)
            if (s->started && s->task.pid == pid && !s->task.reaped) {
                s->max_rss = (uint64_t)used.ru_maxrss * 1024;
                task_reaped(&s->task, status);
            }
    }
}

static void release(struct session *s)
{
    pmi_unguard(s);
    message_reset(&s->exec);
    message_reset(&s->request);
    execspec_free(&s->spec);
    execspec_free(&s->now);
    free(s);
}

/* After the end of its program: remove what it used; true if nothing is left. */
static bool clean_up(struct session *s)
{
    if (s->script_written)
        script_remove(&s->spec);
    s->script_written = false;
    pmi_unguard(s);
    end_relays(s);
    struct usage used;
    accounting_of_session(s, &used);
    if (s->cgroup_made && cgroup_remove(s->agent, s->number) < 0) {
        /* Killed processes need some time to end; this kills one that was forked meanwhile. */
        cgroup_kill(s->agent, s->number, s->task.pid);
        return false;
    }
    accounting_count(s, &used);
    s->cgroup_made = false;
    return true;
}

bool sessions_tick(struct agent *a, long long now)
{
    bool work = false;
    for (struct session **p = &a->sessions; *p != NULL;) {
        struct session *s = *p;
        bool over = !s->started || s->task.finished;
        if (s->started)
            task_tick(&s->task, now);
        bool clean = over && (!s->started || clean_up(s));
        if (s->closed && clean) {
            *p = s->next;
            release(s);
            continue;
        }
        /* A running program needs no timer; one that ends does. */
        if (s->started && ((s->task.reaped && !clean) || (s->closed && !clean)))
            work = true;
        p = &s->next;
    }
    return work;
}
