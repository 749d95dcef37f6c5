/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An srun of the guest that is issued to the host again, because its step ended there when the
 * guest was saved (steps.h). Its client in the guest does not notice.
 *
 * Only the agent of the srun's guest knows that tasks may be detached, perhaps in other guests. So
 * it doubts each srun that ran when its own guest was prepared for a hold, and no task of it is
 * detached before all guests of the job are prepared: if such an srun ends it is issued again, and
 * if all of its tasks have ended, the new step ends at once.
 */
#ifndef VHPC_AGAIN_H
#define VHPC_AGAIN_H

#include "caller.h"

/* The client's EXEC is complete: send it to the host, with a mark if it can be issued again. */
int again_first(struct caller *c, const struct session *s);
/* A frame of the host. 1: it is for the client; 0: it is not; or -errno. */
int again_from_host(struct caller *c, const struct frame *f);
/* The same for one of the client, which has passed its rules: 1: it is for the host. */
int again_from_client(struct caller *c, const struct frame *f);
/* The client has gone: true if the host has nothing to close. */
bool again_left(struct caller *c);

/* One clause: why a call cannot be suspended, whatever happens on the host; false: it can. */
bool again_obstacle(const struct agent *a, char *why, size_t size);
/* From now on, all calls are doubtful. */
void again_doubt(struct agent *a);
/* All calls of a session (NULL: of all) are suspended, and their clients have written all output.
 */
bool again_are_suspended(const struct agent *a, const struct session *s, char *why, size_t size);
/* Another job continues the session: replace variables of Slurm in its suspended calls. */
int again_renew(struct session *s, const struct execspec *now);
/* Issue the suspended calls whose session is attached; 0 or -errno. */
int again_issue_all(struct agent *a);

#endif
