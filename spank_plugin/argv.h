/* SPDX-License-Identifier: Apache-2.0 */
/* Put a program before a task's argv, in each version of Slurm. */
#ifndef VHPC_SPANK_ARGV_H
#define VHPC_SPANK_ARGV_H

#include <slurm/spank.h>
#include <stdbool.h>

/* Set if the program took the place of argv[0] instead of being put before it. */
#define VHPC_ENV_RUN_ARGV0 "VHPC_RUN_ARGV0"

/*
 * Make the task execute path.  If Slurm can prepend (23.02.5 and later), its argv is {path, "--",
 * argv...}. Otherwise it is {path, argv[1]...} and the variable VHPC_RUN_ARGV0 has argv[0].  path
 * must live until the task's execve(). False with why if this Slurm has no way to do it for this
 * task.
 */
bool vhpc_argv_wrap(spank_t spank, const char *path, const char **why);

#endif
