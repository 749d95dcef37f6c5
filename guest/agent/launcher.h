/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemons of Open MPI's mpirun (prted, up to version 4 orted), which mpirun starts by srun.
 * When a daemon is lost, mpirun of Open MPI 5.0.7 returns 0, discards what srun writes, and prints
 * that Slurm is too old. On hosts Slurm ends the whole job then, so nobody sees the 0. In guests
 * the job goes on: the srun of this guest tells the reason, and ends mpirun with an error.
 */
#ifndef VHPC_LAUNCHER_H
#define VHPC_LAUNCHER_H

#include <stdbool.h>

#include "front.h"

/* Whether this command line of srun starts such daemons. */
bool launcher_starts_daemons(int argc, char *const argv[]);
/* If mpirun discards our stderr, write to its own. */
void launcher_show_errors(void);
/* If daemons were lost: end mpirun before it notices that this process ends. */
void launcher_end(const struct front_result *r);

#endif
