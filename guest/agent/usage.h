/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Figures of what programs have used, by Slurm's steps. A figure that the guest's kernel does not
 * measure is absent, and never zero.
 */
#ifndef VHPC_USAGE_H
#define VHPC_USAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum usage_figure {
    USAGE_CPU, /* microseconds */
    USAGE_USER,
    USAGE_SYSTEM,
    USAGE_PEAK, /* bytes: memory, with the cache of files, and files of tmpfs */
    USAGE_RSS,  /* bytes: the largest process */
    USAGE_READ, /* bytes, of block devices */
    USAGE_WRITTEN,
    USAGE_OOM, /* processes that were killed for memory */
    USAGE_FIGURES,
};

struct usage {
    uint32_t has; /* bit N: figure N */
    uint64_t value[USAGE_FIGURES];
};

enum { USAGE_NAME_MAX = 32, USAGE_STEPS_MAX = 256 };

/* The sum of the sessions of a step. */
struct step_usage {
    char name[USAGE_NAME_MAX];
    struct usage usage;
    uint32_t tasks;
    bool oom_told;
};

/* The last row is USAGE_OTHER once the table is full. */
struct usage_table {
    struct step_usage step[USAGE_STEPS_MAX];
    size_t count;
};

/* Sessions without a step, or of a step for which the table has no room. */
#define USAGE_OTHER "other"
/* Programs that ssh has started. */
#define USAGE_SSH "ssh"

void usage_set(struct usage *u, enum usage_figure figure, uint64_t value);
/* The figures of a cgroup, from the files of its directory. */
void usage_read(const char *folder, struct usage *u);
/* The row of a step, which is made if it does not exist; name may be NULL or anything. */
struct step_usage *usage_step(struct usage_table *t, const char *name);
/* Add what one task has used. A figure that one task lacks is unknown for the step. */
void usage_add(struct step_usage *step, const struct usage *one);

#endif
