/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether an srun can be issued again (again.h): its tasks must be in the same guests then. In a
 * job of one guest they always are. In other jobs Slurm chooses nodes for a step by what is free,
 * so only steps of the whole job are certain to be the same again.
 */
#ifndef VHPC_REPEATABLE_H
#define VHPC_REPEATABLE_H

#include <stdbool.h>
#include <stddef.h>

struct repeatable {
    bool never;   /* what another job does not have, or what would happen a second time */
    bool chooses; /* which nodes or CPUs of the job, or where which task is */
    bool one_per_node;
    const char *nodes, *tasks, *nodelist; /* values of these options */
    size_t before;                        /* nodes of the job before those of nodelist */
};

/* An option of srun, by its long name. */
void repeatable_see(struct repeatable *r, const char *name, const char *value);
/* By these options, and variables of this process. */
bool repeatable_is(const struct repeatable *r);
/*
 * How many words from this one on are the option --nodelist. A repeatable step has --relative in
 * its place, if it is on a part of the job, because the next run may have other nodes.
 */
int repeatable_nodelist(const struct repeatable *r, char *const *word);

#endif
