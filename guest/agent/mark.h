/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A mark connects an srun of a guest with its tasks (steps.h). The agent of the srun puts it
 * into the variable VHPC_CALL_VARIABLE, which srun passes on to the agents of the tasks.
 */
#ifndef VHPC_MARK_H
#define VHPC_MARK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "execspec.h"

struct step_mark {
    uint64_t guest; /* id of the agent; 0: there is no mark */
    uint32_t session, call;
    uint64_t hold;  /* the last one that the srun's guest had begun when the srun was issued */
    bool take_over; /* issued again: its tasks are there */
    uint32_t task;  /* SLURM_PROCID; not in the variable */
    /* Whether the task has taken part in fences of its PMI server; not in the variable. */
    enum {
        STEP_FENCES_NONE,
        STEP_FENCES_PMI_1,
        STEP_FENCES_PMI_2,
    } fences;
};

/* The tasks of this guest that have a mark, the newest ones. */
struct step_tasks {
    struct step_mark *entry;
    size_t count, room, next;
};

/* Put the mark into the variable, in place of an earlier one; 0 or -ENOMEM. */
int step_mark_put(struct execspec *spec, const struct step_mark *mark);
/* Take the mark off a task's EXEC; without one, or with a malformed one, it is zero. */
struct step_mark step_mark_take(struct execspec *spec);
bool step_mark_same_srun(const struct step_mark *a, const struct step_mark *b);
bool step_mark_same_task(const struct step_mark *a, const struct step_mark *b);

/* 0 or -ENOMEM. */
int step_tasks_add(struct step_tasks *t, const struct step_mark *mark);
/* NULL: it did not run here. */
struct step_mark *step_tasks_find(const struct step_tasks *t, const struct step_mark *mark);

#endif
