/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The topology operation: where devices are not near each other in the guest
 * as they are on the host, a file tells NCCL how they are.
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
 * Name the file to a program, unless the user has named one himself. A name
 * that an agent of another guest has put there is taken away where this guest
 * has no file. 0 or -ENOMEM.
 */
int topology_environment(const struct agent *a, struct execspec *spec);

#endif
