/* SPDX-License-Identifier: Apache-2.0 */
/* Putting a program before a task's argv, in every version of Slurm. */
#ifndef VHPC_SPANK_ARGV_H
#define VHPC_SPANK_ARGV_H

#include <slurm/spank.h>
#include <stdbool.h>

/* Set for the program when it took the place of argv[0] instead of being put before it. */
#define VHPC_ENV_RUN_ARGV0 "VHPC_RUN_ARGV0"

/*
 * Make the task execute path.  Where Slurm can prepend (23.02.5 and later) its
 * argv is {path, "--", argv...}; else it is {path, argv[1]...} and the variable
 * VHPC_RUN_ARGV0 holds argv[0].  path must live until the task's execve().
 * False with why when this Slurm offers no way for this task.
 */
bool vhpc_argv_wrap(spank_t spank, const char *path, const char **why);

#endif
