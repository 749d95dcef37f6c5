/* SPDX-License-Identifier: Apache-2.0 */
/* The usage of this guest's sessions: from their cgroups into the agent's table. */
#ifndef VHPC_ACCOUNTING_H
#define VHPC_ACCOUNTING_H

#include "buf.h"

struct agent;
struct session;
struct task;
struct usage;

/* The usage of a session until now. */
void accounting_of_session(const struct session *s, struct usage *u);
/* Its last figures: enter them into the table, once. */
void accounting_count(struct session *s, const struct usage *u);
/* OOM_KILLS and MEMORY_KIB in the EXIT of the first program of a step that lost a process for want
 * of memory. */
void accounting_exit_fields(struct task *t, struct buf *b);
/* The fields of the reply to a usage request; 0 or -ENOMEM. */
int accounting_put(const struct agent *a, struct buf *b);

#endif
