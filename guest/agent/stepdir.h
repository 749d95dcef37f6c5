/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The session directory of a step: Slurm's mpi/pmix names it to MPI libraries, which keep their
 * files there. On the node slurmstepd makes and removes it; in a guest the agent does.
 */
#ifndef VHPC_STEPDIR_H
#define VHPC_STEPDIR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { STEPDIR_NAME_MAX = 64 };

/* "spmix_appdir_UID_JOB.STEP" for the namespace "slurm.pmix.JOB.STEP"; false for any other one. */
bool stepdir_name(const char *nspace, uint32_t uid, char name[STEPDIR_NAME_MAX]);
/* Make it in the directory base, with mode 0700; 0 (also if it is there), or -errno. */
int stepdir_make(const char *base, const char *name, uint32_t uid, uint32_t gid);
/*
 * Remove it with what it contains, as far as that belongs to the user, without following links.
 * Bounded: of a huge directory a part stays.
 */
void stepdir_remove(const char *base, const char *name, uint32_t uid);

#endif
