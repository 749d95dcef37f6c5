/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PMIx: each session has a listening socket on the guest's loopback interface, which its
 * PMIX_SERVER_URI* name. Each connection to it becomes a host call with the name VHPC_CALL_PMIX.
 */
#ifndef VHPC_AGENT_PMIX_H
#define VHPC_AGENT_PMIX_H

#include "agent.h"

/*
 * Listen in place of the PMIx server of the session's program, and change the program's variables.
 * 0 (also if it has no PMIx), or -errno.
 */
int pmix_listen(struct session *s);
/* Stop to listen, and close all connections of the session. */
void pmix_close(struct session *s);
/* A frame of the host for a call of the session. 1 if the call is not one of these, 0 or -errno. */
int pmix_frame(struct session *s, const struct frame *f);
/* Free closed connections; between two turns of the loop. */
void pmix_sweep(struct agent *a);

#endif
