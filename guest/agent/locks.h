/* SPDX-License-Identifier: Apache-2.0 */
/* Locks on files of shared folders: a process that asks the node for them (locks/broker.h). */
#ifndef VHPC_AGENT_LOCKS_H
#define VHPC_AGENT_LOCKS_H

#include "agent.h"

/*
 * Start it if the guest has the port for it, for this process and those that it starts from now on.
 * Without it locks are those of this guest; a line on stderr says why.
 */
void locks_start(struct agent *a);
/* The guest was restored: another host serves the port, and this guest holds no lock there. */
void locks_new_host(const struct agent *a);
/* A child has ended. If it is this one, the kernel refuses all locks with ENOSYS from now on. */
void locks_reaped(struct agent *a, pid_t pid);

#endif
