/* SPDX-License-Identifier: Apache-2.0 */
/* The guest's end of `vhpc forward` and `vhpc ssh`: connections to a TCP port or to programs. */
#ifndef VHPC_FORWARD_H
#define VHPC_FORWARD_H

#include "channel.h"

/* Connect to 127.0.0.1, then to ::1. */
int forward_dial(const struct forward *f, unsigned try);
/* Start the program, whose standard input and output are the connection; it has one address. */
int forward_start(const struct forward *f, unsigned try);
/* Whether a socket of this guest listens on a TCP port, as the kernel's table in `path` says. */
bool forward_listens(const char *path, uint16_t port);

/* vhpc-agent --forward PORT [--task N]: returns the exit status. */
int forward_main(int argc, char **argv);
/* vhpc-agent --forward-to PROGRAM ARG...: returns the exit status. */
int forward_to_main(int argc, char **argv);

#endif
