/* SPDX-License-Identifier: Apache-2.0 */
/* The guest's memory: the part that programs can use, and the processes that its kernel may
 * kill. */
#ifndef VHPC_MEMORY_H
#define VHPC_MEMORY_H

#include "agent.h"

/*
 * Scores of oom_score_adj: the kernel never kills the agent for want of memory; programs have the
 * score that slurmstepd gives them. A child that root has reset cannot lower its score again.
 */
#define MEMORY_AGENT "-1000"
#define MEMORY_PROGRAM "0"

void memory_score(const char *score);
/* MiB of MemAvailable in a file such as /proc/meminfo; 0: it has none. */
uint64_t memory_available(const char *file);
/* Set VHPC_MEM_MB: MiB that were available before the guest's first program. 0 or -ENOMEM. */
int memory_environment(struct agent *a, struct execspec *spec);

#endif
