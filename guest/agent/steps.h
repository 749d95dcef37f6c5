/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Steps of a guest that is held. Their host's end cannot be saved: the agent detaches the tasks,
 * the step ends on the host, and its srun in the guest waits (again.h). Afterwards the srun is
 * issued again, and the tasks of the new step take over those of the guest (attach.c).
 */
/* Decision: A step ends when its guests are saved, and is issued again */
#ifndef VHPC_STEPS_H
#define VHPC_STEPS_H

#include "agent.h"

/* One clause: why the host's end of a task with a mark cannot change; false: it can. */
bool step_obstacle(const struct session *s, char *why, size_t size);
/*
 * Detach the tasks with a mark, as far as that is possible now. True: none is attached. Else why
 * has a clause.
 */
bool steps_put_away(struct agent *a, char *why, size_t size);
/* Whether the host has written all output of a session; if not, it is asked to say when. */
bool session_is_settled(struct session *s);

#endif
