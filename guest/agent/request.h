/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The request of a Slurm command in the guest to the host: its arguments, adapted where the host's
 * command would find other files than the guest's.
 */
#ifndef VHPC_REQUEST_H
#define VHPC_REQUEST_H

#include "execspec.h"

/*
 * Add the arguments of the command to spec, which already describes this process. Ends the process
 * with one line if the host's command cannot do what is asked. 0 or -ENOMEM.
 */
int request_describe(const char *name, int argc, char **argv, struct execspec *spec);

#endif
