/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Variables that programs of a job get unless the user has set them otherwise.
 *
 * srun takes the environment of a script to other guests, for which the values may be wrong. So a
 * mark, a variable of words NAME=VALUE, remembers what an agent has set: a variable with another
 * value is the user's. One that is in the mark and not in the environment was removed by the user.
 */
#ifndef VHPC_DEFAULTS_H
#define VHPC_DEFAULTS_H

#include <stdbool.h>
#include <stddef.h>

#include "execspec.h"

struct default_value {
    const char *name;
    const char *value; /* NULL: this agent has none */
    bool always;       /* also in place of the user's value */
};

/* 0 or -ENOMEM. */
int defaults_apply(struct execspec *spec, const char *mark, const struct default_value *list,
                   size_t count);

#endif
