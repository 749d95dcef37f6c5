/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PMI's process mapping: on which node each task of a step is. Its text, as Slurm and MPICH write
 * it, is "(vector,(FIRST,COUNT,TASKS),...)": the next COUNT * TASKS tasks are on COUNT nodes that
 * are numbered from FIRST, in blocks of TASKS. MPI libraries use shared memory between the tasks of
 * a node. If a node has several guests, each guest has to be a node of the mapping.
 */
#ifndef VHPC_MAPPING_H
#define VHPC_MAPPING_H

#include <stddef.h>
#include <stdint.h>

enum {
    MAPPING_TASKS_MAX = 1 << 22,
    /* Characters of a new mapping: MPICH keeps a value, and a line with it, in 1024 bytes. */
    MAPPING_TEXT_MAX = 960,
};

/*
 * Write the mapping for `guests` guests on each node, given the one for nodes, into out. If text is
 * not a mapping of exactly `tasks` tasks (at most MAPPING_TASKS_MAX), or the new one would be too
 * long, the new one has a node for each task: then no task uses shared memory. 0 or -ENOMEM.
 *
 * On a node with `n` tasks, the one with the local number `i` runs in guest i * guests / n, as the
 * SPANK plugin decides (vhpc_state_guest_of).
 */
int mapping_divide(const char *text, size_t len, uint32_t tasks, uint32_t guests,
                   char out[MAPPING_TEXT_MAX + 1]);

#endif
