/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PMI of a session's program. Slurm's ends are relayed: PMI_FD (PMI-1, PMI-2) as any other fd, PMIx
 * by pmix.c.
 *
 * Where PMI cannot work, an MPI library that finds no server behind the variables that Slurm has
 * set runs its task as a separate program ("rank 0 of 1"), or fails with errors that do not name
 * the cause; without a network between the guests it hangs. Therefore the agent detects the first
 * use of PMI and ends the program with the line that came from the host. It holds the other end of
 * PMI_FD, and listens where PMIX_SERVER_URI* say. A program that does not use PMI is not affected,
 * although Slurm sets the variables for each step with a suitable MpiDefault.
 */
/* Decision: Slurm's PMI is relayed, not replaced */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent.h"
#include "fabric.h"
#include "pmix.h"
#include "stepdir.h"

#define PMI_FD "PMI_FD"

/* The program's end, above the fds that can be relayed: Slurm's own number may be in use here. */
enum { PMI_FD_NUMBER = VHPC_FDS_MAX };

static short want_input(struct source *s)
{
    (void)s;
    return POLLIN;
}

/* --- PMI_FD -------------------------------------------------------------------- */

static void close_fd(struct session_pmi *g, struct loop *loop)
{
    if (g->source.fd < 0)
        return;
    loop_remove(loop, &g->source);
    (void)close(g->source.fd);
    g->source.fd = -1;
}

static void fd_ready(struct source *source, short revents)
{
    struct session *s = source->owner;
    char byte;
    (void)revents;
    ssize_t n = read(source->fd, &byte, 1);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    close_fd(&s->pmi, &s->agent->loop);
    if (n > 0) /* otherwise all processes that had the other end have closed it */
        pmi_used(s);
}

static int guard_fd(struct session *s)
{
    char entry[32];
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        return -errno;
    s->pmi.child = ends[1];
    s->pmi.source =
        (struct source){.fd = ends[0], .want = want_input, .ready = fd_ready, .owner = s};
    int rc = fd_prepare(ends[0]);
    if (rc == 0)
        rc = loop_add(&s->agent->loop, &s->pmi.source);
    execspec_drop_env(&s->spec, PMI_FD "=");
    (void)snprintf(entry, sizeof entry, PMI_FD "=%d", PMI_FD_NUMBER);
    return rc == 0 ? execspec_add_env(&s->spec, entry) : rc;
}

int pmi_place(const struct session *s)
{
    if (s->pmi.child < 0)
        return 0;
    if (s->pmi.child == PMI_FD_NUMBER)
        return fcntl(s->pmi.child, F_SETFD, 0) < 0 ? -errno : 0;
    return dup2(s->pmi.child, PMI_FD_NUMBER) < 0 ? -errno : 0;
}

void pmi_started(struct session *s)
{
    if (s->pmi.child >= 0)
        (void)close(s->pmi.child);
    s->pmi.child = -1;
}

/* --- what a program asks ------------------------------------------------------- */

static bool pass(struct exchange *x, uint8_t number, const uint8_t *data, size_t len)
{
    const struct task *t = x->owner;
    struct session *s = t->arg;
    if (number != s->pmi.number)
        return true;
    if (s->mark.guest != 0)
        pmirecord_program(&s->pmi.record, data, len);
    switch (pmiwatch_read(&s->pmi.watch, data, len)) {
    case PMIWATCH_SECOND_INIT:
        pmi_refuse(s, EPERM,
                   "runs a second MPI program in one task, which Slurm's PMI-1 and PMI-2 do not "
                   "offer: start each MPI program with an srun of its own");
        return false;
    case PMIWATCH_SPAWN:
        pmi_not_offered(s, "calls MPI_Comm_spawn");
        return false;
    case PMIWATCH_NOTHING:
        break;
    }
    return true;
}

/*
 * Once the guest is prepared no request begins: a task could wait in a fence for one that is
 * detached already, for good if the checkpoint is refused then.
 */
static bool quiet(const struct exchange *x, uint8_t number)
{
    const struct task *t = x->owner;
    const struct session *s = t->arg;
    return number == s->pmi.number && !s->task.reaped && hold_is_quiet(s->agent);
}

static void heard(struct exchange *x, uint8_t number, const uint8_t *data, size_t len)
{
    const struct task *t = x->owner;
    struct session *s = t->arg;
    struct pmirecord *r = &s->pmi.record;
    if (number != s->pmi.number)
        return;
    pmirecord_server(r, data, len);
    struct step_mark *task =
        s->pmi.fenced || r->fence_len == 0 ? NULL : step_tasks_find(&s->agent->tasks, &s->mark);
    if (task != NULL) {
        task->fences = r->program.fields ? STEP_FENCES_PMI_2 : STEP_FENCES_PMI_1;
        s->pmi.fenced = true;
    }
}

void pmi_watch(struct session *s)
{
    const char *text = execspec_getenv(&s->spec, PMI_FD);
    unsigned long number = text != NULL ? strtoul(text, NULL, 10) : 0;
    if (number <= STDERR_FILENO || number >= VHPC_FDS_MAX || s->spec.fd_dir[number] != VHPC_FD_BOTH)
        return;
    s->pmi.number = (uint8_t)number;
    s->task.exchange.pass = pass;
    if (s->mark.guest != 0) {
        s->task.exchange.heard = heard;
        s->task.exchange.quiet = quiet;
    }
}

/* --- the directory of a step ------------------------------------------------------ */

static const char directories[] = "/tmp";

static bool directory_of(const struct session *s, char name[STEPDIR_NAME_MAX])
{
    const char *nspace = execspec_getenv(&s->spec, "PMIX_NAMESPACE");
    return s->agent->system && stepdir_name(nspace, s->spec.uid, name);
}

static int make_directory(struct session *s)
{
    char name[STEPDIR_NAME_MAX];
    if (!directory_of(s, name))
        return 0;
    s->pmi.directory = true;
    return stepdir_make(directories, name, s->spec.uid, s->spec.gid);
}

/* The last session of the step removes it. */
static void remove_directory(struct session *s)
{
    char name[STEPDIR_NAME_MAX], other[STEPDIR_NAME_MAX];
    if (!s->pmi.directory || !directory_of(s, name))
        return;
    s->pmi.directory = false;
    for (const struct session *o = s->agent->sessions; o != NULL; o = o->next)
        if (o->pmi.directory && directory_of(o, other) && strcmp(name, other) == 0)
            return;
    stepdir_remove(directories, name, s->spec.uid);
}

/* --- a session ----------------------------------------------------------------- */

/* Whether this guest reaches the others of the job. */
static bool has_network(const struct agent *a)
{
    return a->interface != NULL || (a->fabric != NULL && !a->fabric->waiting);
}

/* The line does not apply if what it says is missing is here. */
static bool applies(const struct session *s)
{
    const struct execspec *spec = &s->spec;
    if (spec->pmi_network && !has_network(s->agent))
        return true;
    return !spec->pmi_network && !spec->pmix;
}

int pmi_guard(struct session *s)
{
    struct execspec *spec = &s->spec;
    if (spec->pmi_refusal == NULL)
        return 0;
    if (!applies(s)) {
        free(spec->pmi_refusal);
        spec->pmi_refusal = NULL;
    }
    int rc = spec->pmi_refusal != NULL || spec->pmix ? pmix_listen(s) : 0;
    if (rc == 0 && spec->pmi_refusal != NULL && execspec_getenv(spec, PMI_FD) != NULL)
        rc = guard_fd(s);
    if (rc == 0 && spec->pmix && spec->pmi_refusal == NULL)
        rc = make_directory(s);
    if (rc < 0)
        pmi_unguard(s);
    return rc;
}

void pmi_unguard(struct session *s)
{
    remove_directory(s);
    close_fd(&s->pmi, &s->agent->loop);
    pmi_started(s);
    pmix_close(s);
    pmirecord_free(&s->pmi.record);
    free(s->pmi.failure);
    s->pmi.failure = NULL;
}
