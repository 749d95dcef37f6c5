/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PMIx: each session has a listening socket on the guest's loopback interface, which its
 * PMIX_SERVER_URI* name. Each connection to it becomes a link, with a relay (pmixrelay.h) before
 * it.
 */
#ifndef VHPC_AGENT_PMIX_H
#define VHPC_AGENT_PMIX_H

#include "agent.h"

/*
 * Listen in place of the PMIx server of the session's program, and change the program's variables.
 * 0 (also if it has no PMIx), or -errno.
 */
int pmix_listen(struct session *s);
/* Stop to listen, and close all connections. */
void pmix_close(struct session *s);
/* One clause: why the program's connections cannot get another server now; NULL: they can. */
const char *pmix_obstacle(const struct session *s);
/* Let the connections of a parked program leave the server. True: they have. */
bool pmix_leave(struct session *s);
/*
 * Those that have left get the server of the present step. The program is stopped until it is told:
 * otherwise it could end before, and be one that has died for the server.
 */
void pmix_renew(struct session *s);
/* Free closed connections; between two turns of the loop. */
void pmix_sweep(struct agent *a);

#endif
