/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments of the plugin's line in plugstack.conf. */
#ifndef VHPC_SPANK_ARGS_H
#define VHPC_SPANK_ARGS_H

#include <stdbool.h>
#include <stddef.h>

#include "text.h"

/* Longest path, with its NUL. */
#define VHPC_DIR_SIZE 256

struct vhpc_arg {
    const char *name;
    const char *initial; /* value when the argument is absent */
    const char *detail;  /* sentence for the manual page */
    size_t offset;       /* of its text in struct vhpc_args */
};

#define VHPC_ARG_COUNT 3
extern const struct vhpc_arg vhpc_arg_table[VHPC_ARG_COUNT];

struct vhpc_args {
    char run_dir[VHPC_DIR_SIZE];
    char libexec[VHPC_DIR_SIZE];
    char command[VHPC_DIR_SIZE];
    char wrong[VHPC_WHY_SIZE]; /* first mistake, "" when there is none */
};

/*
 * Read the arguments.  All known ones are used even if another is wrong; false: args->wrong has the
 * reason.
 */
bool vhpc_args_read(struct vhpc_args *args, int count, char *const *words);

#endif
