/* SPDX-License-Identifier: Apache-2.0 */
#include "mark.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "readtext.h"

enum {
    TASKS_FIRST = 64,
    TASKS_MAX = 16384, /* those that still run are among the newest */
    TAKES_OVER = 1,
};

int step_mark_put(struct execspec *spec, const struct step_mark *mark)
{
    char text[128];
    execspec_drop_env(spec, VHPC_CALL_VARIABLE "=");
    (void)snprintf(
        text, sizeof text, VHPC_CALL_VARIABLE "=%" PRIx64 ".%" PRIu32 ".%" PRIu32 ".%" PRIu64 ".%d",
        mark->guest, mark->session, mark->call, mark->hold, mark->take_over ? TAKES_OVER : 0);
    return execspec_add_env(spec, text);
}

static bool read_mark(const char *at, struct step_mark *mark)
{
    uint64_t session, call, takes_over;
    bool good = text_number(&at, 16, '.', &mark->guest) && text_number(&at, 10, '.', &session) &&
                text_number(&at, 10, '.', &call) && text_number(&at, 10, '.', &mark->hold) &&
                text_is_number(at, 10, TAKES_OVER, &takes_over) && session <= UINT32_MAX &&
                call <= UINT32_MAX;
    if (!good)
        return false;
    mark->session = (uint32_t)session;
    mark->call = (uint32_t)call;
    mark->take_over = takes_over == TAKES_OVER;
    return mark->guest != 0;
}

struct step_mark step_mark_take(struct execspec *spec)
{
    const char *text = execspec_getenv(spec, VHPC_CALL_VARIABLE);
    const char *rank = execspec_getenv(spec, "SLURM_PROCID");
    struct step_mark mark = {0};
    uint64_t task;
    bool good = text != NULL && rank != NULL && read_mark(text, &mark) &&
                text_is_number(rank, 10, UINT32_MAX, &task);
    if (good)
        mark.task = (uint32_t)task;
    else
        mark = (struct step_mark){0};
    execspec_drop_env(spec, VHPC_CALL_VARIABLE "=");
    return mark;
}

bool step_mark_same_srun(const struct step_mark *a, const struct step_mark *b)
{
    return a->guest == b->guest && a->session == b->session && a->call == b->call;
}

bool step_mark_same_task(const struct step_mark *a, const struct step_mark *b)
{
    return step_mark_same_srun(a, b) && a->task == b->task;
}

int step_tasks_add(struct step_tasks *t, const struct step_mark *mark)
{
    if (t->count == t->room && t->room < TASKS_MAX) {
        size_t room = t->room == 0 ? TASKS_FIRST : 2 * t->room;
        struct step_mark *entry = realloc(t->entry, room * sizeof *entry);
        if (entry == NULL)
            return -ENOMEM;
        t->entry = entry;
        t->room = room;
    }
    if (t->count < t->room)
        t->count++;
    t->entry[t->next] = *mark;
    t->next = (t->next + 1) % TASKS_MAX;
    return 0;
}

struct step_mark *step_tasks_find(const struct step_tasks *t, const struct step_mark *mark)
{
    for (size_t i = 0; i < t->count; i++)
        if (step_mark_same_task(&t->entry[i], mark))
            return &t->entry[i];
    return NULL;
}
