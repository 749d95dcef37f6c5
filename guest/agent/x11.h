/* SPDX-License-Identifier: Apache-2.0 */
/*
 * X11: for each display that Slurm forwards to the node, a listening socket on the guest's loopback
 * interface with the same number, and a file with the display's cookie, which XAUTHORITY names. The
 * sessions of a display share both; each connection is a link of the session whose program made it.
 */
#ifndef VHPC_AGENT_X11_H
#define VHPC_AGENT_X11_H

#include "agent.h"

/*
 * Serve the display that the EXEC names, if it names one, and change the program's XAUTHORITY. 0 or
 * -ENOMEM; otherwise s->x11_error says why there is no X11.
 */
int x11_listen(struct session *s);
/* Whether a program of the session has a connection. */
bool x11_is_used(const struct session *s);
/* The session needs its display no more. */
void x11_close(struct session *s);

#endif
