/* SPDX-License-Identifier: Apache-2.0 */
/* The directory that TMPDIR names. */
#ifndef VHPC_AGENT_TMPDIR_H
#define VHPC_AGENT_TMPDIR_H

#include "execspec.h"

/*
 * slurmstepd makes the directory for the task's user before each task starts; a guest may lack it,
 * and those above it.
 *
 * As root: make what is missing, except in directories of the guest's own system.
 */
void tmpdir_make(const struct execspec *spec);
/* As the user: TMPDIR is /tmp, with a message, if the directory cannot be used. 0 or -ENOMEM. */
int tmpdir_check(struct execspec *spec);

#endif
