/* SPDX-License-Identifier: Apache-2.0 */
/*
 * X11 of a step with --x11. Slurm's extern step listens on the node's loopback interface and passes
 * each connection on to the submitting host; DISPLAY and XAUTHORITY name that on the node.
 */
#ifndef VHPC_RUN_X11_H
#define VHPC_RUN_X11_H

#include "execspec.h"
#include "frame.h"
#include "link.h"

struct x11 {
    struct link_server server;
    const struct execspec *spec; /* of the program */
};

/*
 * Find the display that Slurm forwards to this node, and describe it in spec: a socket of this user
 * must listen on its port, one of Slurm's for X11. Any other DISPLAY, such as that of a login
 * shell, stays as it is. One line on stderr if the display has no cookie.
 */
void x11_prepare(struct x11 *x, struct execspec *spec);
/* The agent has started the program: one line on stderr if the guest has no relay. */
void x11_started(const struct x11 *x, const struct frame *started);
/*
 * The environment of a command that the guest runs here: its XAUTHORITY, if it is the guest's file,
 * becomes that of this host. 0 or -ENOMEM.
 */
int x11_restore(const struct x11 *x, struct execspec *spec);

#endif
