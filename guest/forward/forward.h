/* SPDX-License-Identifier: Apache-2.0 */
/* The guest's end of `vhpc forward`: connections to a TCP port of this guest. */
#ifndef VHPC_FORWARD_H
#define VHPC_FORWARD_H

#include "channel.h"

/* Connect to 127.0.0.1, then to ::1. */
int forward_dial(const struct forward *f, unsigned try);
/* Whether a socket of this guest listens on a TCP port, as the kernel's table in `path` says. */
bool forward_listens(const char *path, uint16_t port);

/* vhpc-agent --forward PORT [--task N]: returns the exit status. */
int forward_main(int argc, char **argv);

#endif
