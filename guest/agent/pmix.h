/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PMIx: each session has a listening socket on the guest's loopback interface, which its
 * PMIX_SERVER_URI* name. Each connection to it becomes a link.
 */
#ifndef VHPC_AGENT_PMIX_H
#define VHPC_AGENT_PMIX_H

#include "agent.h"

/*
 * Listen in place of the PMIx server of the session's program, and change the program's variables.
 * 0 (also if it has no PMIx), or -errno.
 */
int pmix_listen(struct session *s);
/* Stop to listen. */
void pmix_close(struct session *s);

#endif
