/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Host calls. The guest never gets a munge key: its srun sends a request here, and the real srun
 * runs on the host, as the job's user, in the job's own step.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "callfiles.h"
#include "hello.h"
#include "link.h"
#include "pmi.h"
#include "run.h"
#include "x11.h"

static const char standard_path[] = "/usr/local/bin:/usr/bin:/bin";

struct host_call {
    struct host_call *next;
    uint32_t id;
    struct message message; /* EXEC being received */
    struct flow flow;       /* until the task has it */
    struct execspec spec;
    struct task task;
    struct link link;
    struct call_files files;
    bool started; /* the task has */
    bool linked;  /* ... or the link */
    bool over;    /* to be freed */
};

static struct host_calls *calls_of(const struct front *f)
{
    return f->owner;
}

/* --- the child ---------------------------------------------------------------- */

static int prepare(const struct execspec *spec, void *arg, struct child_report *report)
{
    (void)arg;
    (void)report;
    /* srun ends its step if it gets a signal, but not if it is killed. */
    (void)prctl(PR_SET_PDEATHSIG, SIGTERM, 0, 0, 0);
    if (spec->has_umask)
        (void)umask((mode_t)(spec->umask & 0777));
    child_limits(spec); /* srun passes its own signals on to its step */
    child_chdir(spec, "vhpc-run");
    return 0;
}

static int execute(const struct execspec *spec, void *arg, struct child_report *report)
{
    const struct host_calls *calls = arg;
    const char *slash = strrchr(spec->argv[0], '/');
    return child_execve(slash != NULL ? slash + 1 : spec->argv[0], calls->path, spec->argv,
                        spec->envp, report);
}

static void kill_rest(struct task *t)
{
    if (t->pid > 0)
        (void)kill(-t->pid, SIGKILL);
}

static const struct task_ops ops = {
    .child = {.prepare = prepare, .execute = execute},
    .kill_rest = kill_rest,
    .abort_signal = SIGTERM,
};

/* --- requests ----------------------------------------------------------------- */

static bool allowed(const struct host_calls *h, const char *argv0)
{
    const char *slash = strrchr(argv0, '/');
    const char *name = slash != NULL ? slash + 1 : argv0;
    size_t len = strlen(name);
    for (const char *p = h->allowed; p != NULL && len > 0;) {
        size_t n = strcspn(p, ":");
        if (n == len && strncmp(p, name, n) == 0)
            return true;
        p = p[n] == ':' ? p + n + 1 : NULL;
    }
    return false;
}

/*
 * The shim counts calls, but a guest that ends its calls at once would have any number of commands
 * here that are still ending.
 */
static bool too_many(const struct host_calls *h)
{
    size_t count = 0;
    for (const struct host_call *c = h->list; c != NULL; c = c->next)
        count += c->started && !c->task.finished;
    return count >= VHPC_CALLS_MAX;
}

/* The server that the call connects to; NULL: it is a command. */
static const struct link_server *server_of(const struct host_calls *h, const struct execspec *spec)
{
    const struct link_server *server = NULL;
    if (strcmp(spec->argv[0], VHPC_CALL_PMIX) == 0)
        server = &h->pmi->pmix;
    else if (strcmp(spec->argv[0], VHPC_CALL_X11) == 0)
        server = &h->x11->server;
    return server != NULL && server->len > 0 && spec->fd_dir[0] == VHPC_FD_BOTH ? server : NULL;
}

static int begin(struct host_call *c, struct host_calls *h)
{
    char text[256];
    int rc = execspec_decode(buf_head(&c->message.data), c->message.data.len, &c->spec);
    message_reset(&c->message);
    if (rc < 0)
        return rc;
    const struct link_server *server = server_of(h, &c->spec);
    if (server != NULL) {
        c->linked = true;
        return link_open(&c->link, server, &h->front->loop, &h->front->chan, c->id, &c->flow);
    }
    execspec_drop_env(&c->spec, "VHPC_RUN_");
    execspec_drop_env(&c->spec, "VHPC_SESSION=");
    rc = x11_restore(h->x11, &c->spec);
    if (rc < 0)
        return rc;
    if (!allowed(h, c->spec.argv[0])) {
        (void)snprintf(text, sizeof text, "%.64s: guests may not run this command on the host",
                       c->spec.argv[0]);
        rc = -EPERM;
    } else if (too_many(h)) { /* the command in the guest tries again */
        (void)snprintf(text, sizeof text, "too many host commands at once in this step");
        rc = -EAGAIN;
    } else {
        rc = call_files_prepare(&c->files, &c->spec, h->socket, text, sizeof text);
    }
    if (rc < 0) {
        c->over = true;
        return error_send(&h->front->chan, 0, c->id, VHPC_ERR_REFUSED, -rc, text);
    }
    c->started = true;
    return task_start(&c->task, &ops, h, &h->front->loop, &h->front->chan, 0, c->id, &c->flow,
                      &c->spec);
}

static struct host_call *find(const struct host_calls *h, uint32_t id)
{
    for (struct host_call *c = h->list; c != NULL; c = c->next)
        if (c->id == id)
            return c;
    return NULL;
}

void host_calls_started(struct front *f, const struct frame *frame)
{
    x11_started(calls_of(f)->x11, frame);
    pmi_say_emulated(f->spec, frame);
    pmi_tell(calls_of(f)->pmi, f, frame);
}

int host_calls_frame(struct front *f, const struct frame *frame)
{
    struct host_calls *h = calls_of(f);
    struct host_call *c = find(h, frame->call);
    if (c == NULL && frame->type != VHPC_EXEC)
        return 0; /* frame of a call that has ended */
    if (c == NULL) {
        c = calloc(1, sizeof *c);
        if (c == NULL)
            return -ENOMEM;
        c->id = frame->call;
        c->next = h->list;
        h->list = c;
    }
    if (c->over)
        return 0;
    if (c->started) {
        int rc = task_frame(&c->task, frame);
        return rc == -EPROTO ? chan_broken(&f->chan, c->task.exchange.flow.why) : rc;
    }
    if (c->linked) {
        int rc = link_frame(&c->link, frame);
        return rc == -EPROTO ? chan_broken(&f->chan, c->link.exchange.flow.why) : rc;
    }
    if (flow_check(&c->flow, FLOW_INITIATOR, frame) != FLOW_PASS)
        return chan_broken(&f->chan, c->flow.why);
    if (frame->type == VHPC_CLOSE) {
        c->over = true;
        return 0;
    }
    int rc = message_add(&c->message, frame);
    return rc == 1 ? begin(c, h) : rc;
}

void host_calls_reap(struct front *f)
{
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (struct host_call *c = calls_of(f)->list; c != NULL; c = c->next)
            if (c->started && c->task.pid == pid && !c->task.reaped)
                task_reaped(&c->task, status);
}

/* True while the call has deadlines. */
static bool tick(struct host_call *c, long long now)
{
    if (c->started)
        task_tick(&c->task, now);
    if (c->linked)
        link_tick(&c->link, now);
    c->over = c->over || (c->started && c->task.finished) || (c->linked && c->link.over);
    return !c->linked || c->link.connecting.fd >= 0;
}

void host_calls_tick(struct front *f, long long now)
{
    /* An idle task must not wake a core that computes: no timer without a call that needs it. */
    f->ticking = false;
    for (struct host_call **p = &calls_of(f)->list; *p != NULL;) {
        struct host_call *c = *p;
        bool timed = tick(c, now);
        if (!c->over) {
            f->ticking = f->ticking || timed;
            p = &c->next;
            continue;
        }
        *p = c->next;
        message_reset(&c->message);
        call_files_drop(&c->files);
        execspec_free(&c->spec);
        free(c);
    }
}

void host_calls_end(struct host_calls *h)
{
    for (struct host_call *c = h->list; c != NULL; c = c->next)
        call_files_drop(&c->files);
}

void host_calls_init(struct host_calls *h, struct front *f, const char *socket, struct pmi *pmi,
                     const struct x11 *x11)
{
    const char *more = getenv("VHPC_RUN_COMMAND_PATH");
    *h = (struct host_calls){.front = f,
                             .socket = socket,
                             .pmi = pmi,
                             .x11 = x11,
                             .allowed = getenv("VHPC_RUN_COMMANDS")};
    if (more == NULL || more[0] == '\0' || asprintf(&h->path, "%s:%s", standard_path, more) < 0)
        h->path = strdup(standard_path);
}
