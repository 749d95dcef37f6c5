/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A batch script that another job continues has the environment of its first job, and so have the
 * programs that it starts. A command that it runs on the host has to name the job that runs now:
 * the agent keeps both values of such variables in a file, and commands replace one by the other.
 */
#ifndef VHPC_RESUMED_H
#define VHPC_RESUMED_H

#include "execspec.h"

#define RESUMED_FILE "/run/vhpc/resumed-environment"

/*
 * Write the variables of Slurm and vhpc whose values differ between the script's first environment
 * and that of the job that continues it; without any, the file is removed. 0 or -errno.
 */
int resumed_write(const char *path, const struct execspec *first, const struct execspec *now);
/* Replace variables of Slurm and vhpc that have the value of `before` by those of `now`; 0 or
 * -ENOMEM. */
int resumed_replace(struct execspec *spec, const struct execspec *before,
                    const struct execspec *now);
/* Replace the values in this process's environment that are still those of the first job. */
void resumed_apply(const char *path);

#endif
