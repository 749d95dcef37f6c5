/* SPDX-License-Identifier: Apache-2.0 */
#include "hold.h"

#include <ctype.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <time.h>

#include "again.h"
#include "locks.h"
#include "mounts.h"
#include "pmix.h"
#include "readtext.h"
#include "reply.h"
#include "steps.h"

enum { WAIT_MAX_MS = 600 * 1000, LOCK_PAUSE_MS = 200, SECOND_NS = 1000000000 };

/* --- what is in the way ------------------------------------------------------------------ */

static bool is_batch(const struct session *s)
{
    return s->started && !s->closed && s->spec.step != NULL && strcmp(s->spec.step, "batch") == 0;
}

/* NULL: the batch script can be held. */
static const char *batch_obstacle(const struct session *s)
{
    const struct exchange *x = &s->task.exchange;
    if (s->task.reaped)
        return "the batch script ends";
    if (x->flow.phase != FLOW_RUNNING)
        return "the batch script starts";
    /* Bytes that the host has read and the program has not would be lost. */
    for (size_t i = 0; i < VHPC_FDS_MAX; i++)
        if (x->outlet[i].open && !x->outlet[i].eof)
            return "the batch script reads an input that has not ended";
    return s->links > 0 ? "a connection to the node's X11 or PMIx server is open" : NULL;
}

static void name_program(const struct session *s, char *why, size_t size)
{
    const char *step = s->spec.step;
    if (step == NULL)
        (void)snprintf(why, size, "the program %.100s runs",
                       s->spec.argc > 0 ? s->spec.argv[0] : "?");
    else
        (void)snprintf(why, size, "%sstep %.40s runs",
                       isdigit((unsigned char)step[0]) ? "" : "the ", step);
}

/* True if something depends on a process of the host; with one clause in why. */
static bool obstacle(const struct agent *a, char *why, size_t size)
{
    const struct session *batch = NULL;
    for (const struct session *s = a->sessions; s != NULL; s = s->next) {
        const char *what = NULL;
        if (s->task.detached || (s->started && s->task.finished && !s->cgroup_made))
            continue;
        if (!s->started && s->exec.type != 0)
            what = "a program is about to start";
        else if (!s->started)
            continue; /* root's control operations */
        else if (s->mark.guest != 0) {
            if (step_obstacle(s, why, size))
                return true;
            continue;
        } else if (is_batch(s) && batch == NULL) {
            batch = s;
            what = batch_obstacle(s);
            if (what == NULL)
                continue;
        }
        if (what != NULL)
            (void)snprintf(why, size, "%s", what);
        else
            name_program(s, why, size);
        return true;
    }
    return again_obstacle(a, why, size);
}

/* "1: POSIX  ADVISORY  WRITE 812 00:2d:1234 0 EOF"; those that wait have "->" behind the number. */
static bool locked_device(const char *line, dev_t *device)
{
    char word[32], class[16];
    uint64_t major, minor;
    bool good = text_word(&line, word, sizeof word) && text_word(&line, class, sizeof class) &&
                text_word(&line, word, sizeof word) && text_word(&line, word, sizeof word) &&
                text_word(&line, word, sizeof word) && text_number(&line, 16, ':', &major) &&
                text_number(&line, 16, ':', &minor);
    if (!good || (strcmp(class, "FLOCK") != 0 && strcmp(class, "POSIX") != 0 &&
                  strcmp(class, "OFDLCK") != 0))
        return false;
    *device = makedev((unsigned)major, (unsigned)minor);
    return true;
}

static const char *point_of(const struct mounts *m, dev_t device)
{
    for (size_t i = 0; i < m->count; i++)
        if (m->entry[i].device == device)
            return m->entry[i].point;
    return "?";
}

bool hold_finds_lock(const char *locks, const char *mounts, char *text, size_t size)
{
    struct mounts m;
    char *line = NULL;
    size_t room = 0;
    dev_t device;
    bool found = false;
    if (mounts_read(&m, mounts) < 0)
        return false;
    FILE *f = fopen(locks, "re");
    while (f != NULL && !found && getline(&line, &room, f) > 0)
        found = locked_device(line, &device) && mounts_tag(&m, device) != NULL;
    if (found)
        (void)snprintf(text, size, "a program holds a lock on a file in %.150s",
                       point_of(&m, device));
    free(line);
    if (f != NULL)
        (void)fclose(f);
    mounts_free(&m);
    return found;
}

/* --- stop and continue --------------------------------------------------------------------- */

/* Attached programs and those of ssh continue; detached ones wait for their client, or not. */
static void thaw(struct agent *a, bool all)
{
    for (struct session *s = a->sessions; s != NULL; s = s->next) {
        if (s->parked && (all || !s->task.detached)) {
            (void)session_park(s, false);
            pmix_renew(s);
        }
    }
    (void)cgroup_freeze_login(a, false);
}

/* 0 or -errno. */
static int freeze(struct agent *a)
{
    for (struct session *s = a->sessions; s != NULL; s = s->next) {
        bool ours = s->task.detached ? s->mark.guest != 0 : is_batch(s);
        if (!ours || s->task.finished || s->closed)
            continue;
        if (!session_park(s, true))
            return -ENOTSUP;
    }
    return cgroup_freeze_login(a, true) < 0 ? -ENOTSUP : 0;
}

static bool all_frozen(const struct agent *a)
{
    for (const struct session *s = a->sessions; s != NULL; s = s->next)
        if (s->parked && !cgroup_is_frozen(a, s->number))
            return false;
    return cgroup_is_frozen(a, 0);
}

/* True if the host has written all output. */
static bool drained(const struct agent *a)
{
    bool all = true;
    for (struct session *s = a->sessions; s != NULL; s = s->next)
        if (s->parked && !s->task.detached)
            all = session_is_settled(s) && all;
    return all;
}

static struct session *oldest_waiting(const struct agent *a)
{
    struct session *found = NULL;
    for (struct session *s = a->sessions; s != NULL; s = s->next)
        if (s->waiting && !s->closed)
            found = s; /* later ones come first in the list */
    return found;
}

static int go_on(struct agent *a)
{
    a->hold.phase = HOLD_NONE;
    thaw(a, false);
    for (struct session *s = a->sessions; s != NULL; s = s->next)
        if (s->task.detached)
            (void)session_park(s, true);
    for (struct session *s; (s = oldest_waiting(a)) != NULL;) {
        s->waiting = false;
        int rc = session_begin(s);
        if (rc < 0)
            (void)error_send(&a->host, s->id, 0, VHPC_ERR_INTERNAL, -rc, strerror(-rc));
    }
    return again_issue_all(a);
}

/* --- the operation ------------------------------------------------------------------------- */

static int ask(struct session *s, const struct hold_want *want, char *text, size_t size,
               bool *later)
{
    struct agent *a = s->agent;
    struct hold *h = &a->hold;
    bool prepare = want->op == VHPC_OP_PREPARE;
    if (h->phase == HOLD_HELD || (prepare && h->phase == HOLD_PREPARED))
        return 0;
    if (h->phase != (prepare ? HOLD_NONE : HOLD_PREPARED)) {
        (void)snprintf(text, size, "%s",
                       h->phase == HOLD_NONE ? "the guest was not prepared for it"
                                             : "another hold request is still waiting");
        return h->phase == HOLD_NONE ? -EINVAL : -EBUSY;
    }
    if (a->cgroup == NULL) {
        (void)snprintf(text, size, "the guest has no cgroup v2");
        return -ENOTSUP;
    }
    h->phase = prepare ? HOLD_WAITING : HOLD_STEPS;
    if (prepare)
        h->next_serial = want->serial;
    h->session = s->id;
    h->request = want->request;
    h->left = false;
    h->next = 0;
    h->until = now_ms() + (want->wait_ms < WAIT_MAX_MS ? want->wait_ms : WAIT_MAX_MS);
    *later = true;
    return 0;
}

/* One step; true if it leads to the next one, so that this one need not wait. */
static bool step(struct agent *a, long long now, int *rc)
{
    struct hold *h = &a->hold;
    switch (h->phase) {
    case HOLD_WAITING:
        if (obstacle(a, h->why, sizeof h->why))
            return false;
        again_doubt(a);
        if (h->next_serial > h->serial)
            h->serial = h->next_serial;
        h->phase = HOLD_PREPARED;
        return false;
    case HOLD_STEPS:
        if (now < h->next || !steps_put_away(a, h->why, sizeof h->why) ||
            !again_are_suspended(a, NULL, h->why, sizeof h->why) ||
            obstacle(a, h->why, sizeof h->why))
            return false;
        *rc = freeze(a);
        h->phase = HOLD_FREEZING;
        (void)snprintf(h->why, sizeof h->why, "%s",
                       *rc < 0 ? "the guest's kernel cannot freeze cgroups"
                               : "a process cannot be stopped");
        return *rc == 0;
    case HOLD_FREEZING:
        if (!all_frozen(a))
            return false;
        if (a->locks > 0 &&
            hold_finds_lock("/proc/locks", "/proc/self/mountinfo", h->why, sizeof h->why)) {
            /* Most programs hold a lock for a moment only. */
            h->phase = HOLD_STEPS;
            h->next = now + LOCK_PAUSE_MS;
            thaw(a, true);
            return false;
        }
        h->phase = HOLD_DRAINING;
        (void)snprintf(h->why, sizeof h->why,
                       "the batch script's output is not written to its file yet");
        return true;
    case HOLD_DRAINING:
        if (drained(a))
            h->phase = HOLD_HELD;
        return false;
    default:
        return false;
    }
}

int hold_tick(struct agent *a, long long now, bool *work)
{
    struct hold *h = &a->hold;
    const struct buf none = {0};
    int rc = 0;
    if (h->phase == HOLD_HELD)
        /* A task of another guest's srun may start until that guest is held too. */
        *work = !steps_put_away(a, h->why, sizeof h->why) || *work;
    if (h->phase == HOLD_NONE || h->phase == HOLD_PREPARED || h->phase == HOLD_HELD)
        return 0;
    if (h->left)
        return go_on(a);
    while (step(a, now, &rc))
        ;
    if (h->phase == HOLD_HELD || h->phase == HOLD_PREPARED)
        return reply_send(a, h->session, h->request, 0, "", &none);
    if (rc == 0 && now >= h->until)
        rc = -EBUSY;
    *work = true;
    if (rc == 0)
        return 0;
    int sent = reply_send(a, h->session, h->request, rc, h->why, &none);
    rc = go_on(a);
    return sent < 0 ? sent : rc;
}

static int release(struct agent *a)
{
    return a->hold.phase != HOLD_NONE ? go_on(a) : 0;
}

static int resume(struct agent *a, const struct hold_want *want, char *text, size_t size)
{
    struct timespec t = {.tv_sec = (time_t)(want->time_ns / SECOND_NS),
                         .tv_nsec = (long)(want->time_ns % SECOND_NS)};
    if (a->hold.phase != HOLD_HELD) {
        (void)snprintf(text, size, "the guest is not held");
        return -EINVAL;
    }
    if (a->system && clock_settime(CLOCK_REALTIME, &t) < 0) {
        int rc = -errno;
        (void)snprintf(text, size, "couldn't set the clock: %s", strerror(-rc));
        return rc;
    }
    locks_new_host(a);
    return go_on(a);
}

int hold_perform(struct session *s, const struct hold_want *want, char *text, size_t size,
                 bool *later)
{
    switch (want->op) {
    case VHPC_OP_PREPARE:
    case VHPC_OP_HOLD:
        return ask(s, want, text, size, later);
    case VHPC_OP_RELEASE:
        return release(s->agent);
    case VHPC_OP_RESUME:
        return resume(s->agent, want, text, size);
    default:
        (void)snprintf(text, size, "operation %u is unknown to this agent", want->op);
        return -ENOSYS;
    }
}

void hold_new_host(struct agent *a)
{
    bool held = a->hold.phase == HOLD_HELD;
    for (struct session *s = a->sessions; s != NULL; s = s->next) {
        if (s->task.detached)
            continue;
        if (held && s->parked && !s->closed && !s->task.finished)
            s->task.detached = true;
        else
            session_close(s);
    }
    if (!held)
        (void)release(a);
}
