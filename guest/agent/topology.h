/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The topology operation: if the distances between devices in the guest differ from those on the
 * host, a file tells NCCL the real ones.
 */
#ifndef VHPC_TOPOLOGY_H
#define VHPC_TOPOLOGY_H

#include <stddef.h>

#include "agent.h"
#include "execspec.h"

enum { TOPOLOGY_MAX = 131072 }; /* bytes of the file */

/* Write the file; 0, or -errno with one line in text. */
int topology_set(struct agent *a, const char *xml, char *text, size_t size);

/*
 * Set NCCL_TOPO_FILE for a program, unless the user has set it. If this guest has no file, a value
 * that the agent of another guest has set is removed. 0 or -ENOMEM.
 */
int topology_environment(const struct agent *a, struct execspec *spec);

#endif
