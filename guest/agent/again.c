/* SPDX-License-Identifier: Apache-2.0 */
#include "again.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "resumed.h"
#include "tlv.h"

/* --- the EXEC ---------------------------------------------------------------------------- */

static int send_exec(struct caller *c, const struct session *s)
{
    return chan_send_message(&c->agent->host, VHPC_EXEC, s->id, c->call, &c->message.data);
}

static int encode(struct caller *c, const struct execspec *spec)
{
    struct buf b = {0};
    int rc = execspec_encode(spec, &b);
    if (rc < 0) {
        buf_free(&b);
        return rc;
    }
    buf_free(&c->message.data);
    c->message.data = b;
    return 0;
}

int again_first(struct caller *c, const struct session *s)
{
    struct execspec spec;
    int rc = execspec_decode(buf_head(&c->message.data), c->message.data.len, &spec);
    if (rc < 0)
        return rc;
    if (execspec_getenv(&spec, VHPC_CALL_VARIABLE) != NULL) {
        c->mark = (struct step_mark){.guest = c->agent->id,
                                     .session = c->session,
                                     .call = c->call,
                                     .hold = c->agent->hold.serial};
        rc = step_mark_put(&spec, &c->mark);
        rc = rc < 0 ? rc : encode(c, &spec);
    }
    execspec_free(&spec);
    rc = rc < 0 ? rc : send_exec(c, s);
    if (c->mark.guest == 0)
        message_reset(&c->message);
    return rc;
}

/* Its first step has written to the same files; what srun says of itself was said already. */
static int set_options(struct execspec *spec)
{
    static const char *const words[] = {"--quiet", "--open-mode=append"};
    int rc = 0;
    for (size_t i = 0; i < sizeof words / sizeof words[0] && rc == 0; i++)
        rc = execspec_insert_arg(spec, 1, words[i]);
    return rc;
}

static int issue(struct caller *c, struct session *s)
{
    struct execspec spec;
    int rc = execspec_decode(buf_head(&c->message.data), c->message.data.len, &spec);
    if (rc < 0)
        return rc;
    if (!c->mark.take_over)
        rc = set_options(&spec);
    c->mark.take_over = true;
    c->mark.hold = c->agent->hold.serial;
    rc = rc < 0 ? rc : step_mark_put(&spec, &c->mark);
    rc = rc < 0 ? rc : encode(c, &spec);
    execspec_free(&spec);
    c->call = ++s->last_call;
    c->suspended = c->doubtful = false;
    c->restarting = true;
    return rc < 0 ? rc : send_exec(c, s);
}

static struct caller *oldest_suspended(const struct agent *a)
{
    struct caller *found = NULL;
    for (struct caller *c = a->callers; c != NULL; c = c->next) {
        const struct session *s = session_numbered(a, c->session);
        if (c->suspended && !c->chan.closed && s != NULL && !s->task.detached)
            found = c; /* later ones come first in the list */
    }
    return found;
}

int again_issue_all(struct agent *a)
{
    int rc = 0;
    if (hold_is_quiet(a) || !a->host_open)
        return 0;
    for (struct caller *c; rc == 0 && (c = oldest_suspended(a)) != NULL;)
        rc = issue(c, session_numbered(a, c->session));
    return rc;
}

int again_renew(struct session *s, const struct execspec *now)
{
    const struct execspec *before = s->now.envc > 0 ? &s->now : &s->spec;
    int rc = 0;
    for (struct caller *c = s->agent->callers; c != NULL && rc == 0; c = c->next) {
        struct execspec spec;
        if (!c->suspended || c->session != s->number)
            continue;
        rc = execspec_decode(buf_head(&c->message.data), c->message.data.len, &spec);
        if (rc < 0)
            return rc;
        rc = resumed_replace(&spec, before, now);
        rc = rc < 0 ? rc : encode(c, &spec);
        execspec_free(&spec);
    }
    return rc;
}

/* --- frames -------------------------------------------------------------------------------- */

static int send_up(struct caller *c, uint8_t type, uint8_t fd, uint16_t flags, const uint8_t *data,
                   uint32_t len)
{
    const struct session *s = session_numbered(c->agent, c->session);
    struct frame f = {.type = type,
                      .fd = fd,
                      .flags = flags,
                      .session = s != NULL ? s->id : 0,
                      .call = c->call,
                      .length = len,
                      .payload = data};
    return s != NULL ? chan_send(&c->agent->host, &f) : 0;
}

/* The host's new command has the state that the client knows: ended lanes, and its signals. */
static int restarted(struct caller *c)
{
    uint8_t raw[4];
    int rc = 0;
    c->restarting = false;
    for (int i = 0; i < VHPC_FDS_MAX && rc == 0; i++) {
        if (c->flow.lane[i][FLOW_INITIATOR].eof)
            rc = send_up(c, VHPC_EOF, (uint8_t)i, 0, NULL, 0);
        if (rc == 0 && c->flow.lane[i][FLOW_EXECUTOR].gone)
            rc = send_up(c, VHPC_EOF, (uint8_t)i, VHPC_READER, NULL, 0);
    }
    for (size_t i = 0; i < c->signal_count && rc == 0; i++) {
        put_le32(raw, c->signals[i]);
        rc = send_up(c, VHPC_SIGNAL, VHPC_TO_MAIN, 0, raw, sizeof raw);
    }
    c->signal_count = 0;
    return rc;
}

static bool exit_code(const struct frame *f, uint32_t *code)
{
    struct tlv t;
    return tlv_find(f->payload, f->length, TAG_EXIT_CODE, &t) && tlv_u32(&t, code) == 0;
}

/* srun ends with the highest code of its tasks, and some have ended in an earlier step. */
static int pass_exit(struct caller *c)
{
    struct buf b = {0};
    int rc = tlv_put_u32(&b, TAG_EXIT_CODE, c->status);
    struct frame f = {.type = VHPC_EXIT, .length = (uint32_t)b.len, .payload = buf_head(&b)};
    if (rc == 0 && flow_check(&c->flow, FLOW_EXECUTOR, &f) == FLOW_PASS)
        rc = chan_send(&c->chan, &f);
    buf_free(&b);
    chan_finish(&c->chan);
    return rc;
}

static int ended(struct caller *c, uint32_t code)
{
    if (code > c->status)
        c->status = code;
    if (!c->doubtful)
        return pass_exit(c);
    c->suspended = true;
    return again_issue_all(c->agent);
}

/* Of the new command, about a lane that has ended for the client. */
static bool is_repeated(const struct caller *c, const struct frame *f)
{
    if (!c->mark.take_over || f->fd >= VHPC_FDS_MAX)
        return false;
    const struct flow_lane *lane = c->flow.lane[f->fd];
    if (f->type == VHPC_EOF && (f->flags & VHPC_READER))
        return lane[FLOW_INITIATOR].gone;
    return (f->type == VHPC_EOF && lane[FLOW_EXECUTOR].eof) ||
           (f->type == VHPC_DATA && (lane[FLOW_EXECUTOR].eof || lane[FLOW_EXECUTOR].gone));
}

int again_from_host(struct caller *c, const struct frame *f)
{
    uint32_t code;
    if (c->mark.guest == 0 || c->chan.closed)
        return 1;
    if (f->type == VHPC_STARTED && c->restarting)
        return restarted(c);
    if (f->type == VHPC_EXIT && exit_code(f, &code) && !c->restarting)
        return ended(c, code);
    if (is_repeated(c, f))
        return 0;
    /* Output ends for good when the command does, which is not known yet. */
    return !(f->type == VHPC_EOF && (f->flags & VHPC_READER) == 0 && c->doubtful);
}

int again_from_client(struct caller *c, const struct frame *f)
{
    if (!c->suspended && !c->restarting)
        return 1;
    if (f->type == VHPC_SIGNAL && f->fd == VHPC_TO_MAIN && c->signal_count < CALLER_SIGNALS_MAX)
        c->signals[c->signal_count++] = f->payload[0];
    return 0; /* ends of lanes are in its flow; there is no credit to return */
}

bool again_left(struct caller *c)
{
    if (!c->suspended)
        return false;
    for (struct session *s = c->agent->sessions; s != NULL; s = s->next)
        if (s->task.detached && step_mark_same_srun(&s->mark, &c->mark)) {
            s->closed = true;
            task_abort(&s->task);
        }
    return true;
}

/* --- holds --------------------------------------------------------------------------------- */

static void name_of(const struct caller *c, char *name, size_t size)
{
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/%d/comm", (int)c->pid);
    FILE *f = fopen(path, "re");
    if (f == NULL || fgets(name, (int)size, f) == NULL)
        (void)snprintf(name, size, "?");
    name[strcspn(name, "\n")] = '\0';
    if (f != NULL)
        (void)fclose(f);
}

/* Slurm may take minutes for a step, for example after a restart of slurmctld. */
static bool has_waiting_tasks(const struct caller *c)
{
    for (const struct session *s = c->agent->sessions; s != NULL; s = s->next)
        if (s->task.detached && step_mark_same_srun(&s->mark, &c->mark))
            return true;
    return false;
}

static const char *clause(const struct caller *c)
{
    if (c->mark.guest == 0)
        return "runs";
    if (c->flow.phase != FLOW_RUNNING || c->restarting || has_waiting_tasks(c))
        return "starts";
    for (size_t i = 0; i < VHPC_FDS_MAX; i++)
        if (c->flow.lane[i][FLOW_INITIATOR].open && !c->flow.lane[i][FLOW_INITIATOR].eof)
            return "reads an input that has not ended";
    return NULL;
}

bool again_obstacle(const struct agent *a, char *why, size_t size)
{
    char name[64];
    for (const struct caller *c = a->callers; c != NULL; c = c->next) {
        const char *what = caller_is_alive(c) && !c->suspended ? clause(c) : NULL;
        if (what == NULL)
            continue;
        name_of(c, name, sizeof name);
        (void)snprintf(why, size, "the command %s %s", name, what);
        return true;
    }
    return false;
}

void again_doubt(struct agent *a)
{
    for (struct caller *c = a->callers; c != NULL; c = c->next)
        c->doubtful = c->doubtful || (c->mark.guest != 0 && caller_is_alive(c));
}

static bool caller_is_settled(struct caller *c)
{
    bool settled = true;
    for (int i = 0; i < VHPC_FDS_MAX; i++) {
        struct frame f = {.type = VHPC_SYNC, .fd = (uint8_t)i};
        if (flow_settled(&c->flow, (uint8_t)i))
            continue;
        settled = false;
        if (flow_check(&c->flow, FLOW_EXECUTOR, &f) == FLOW_PASS)
            (void)chan_send(&c->chan, &f);
    }
    return settled;
}

bool again_are_suspended(const struct agent *a, const struct session *s, char *why, size_t size)
{
    bool all = true;
    for (struct caller *c = a->callers; c != NULL; c = c->next) {
        if (!caller_is_alive(c) || (s != NULL && c->session != s->number))
            continue;
        if (c->suspended && caller_is_settled(c))
            continue;
        if (all)
            (void)snprintf(why, size, "%s",
                           c->suspended ? "the output of a command is not read"
                                        : "the step of a command does not end");
        all = false;
    }
    return all;
}
