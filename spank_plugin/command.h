/* SPDX-License-Identifier: Apache-2.0 */
/* The command `vhpc`, which the commands of Slurm run with the rights of their user. */
#ifndef VHPC_SPANK_COMMAND_H
#define VHPC_SPANK_COMMAND_H

#include <stddef.h>

enum vhpc_command_end {
    VHPC_COMMAND_DONE,
    VHPC_COMMAND_NOT_STARTED, /* errno says why */
    VHPC_COMMAND_FAILED,      /* it has said why, on stderr */
    VHPC_COMMAND_UNREADABLE,  /* it printed too much, or a NUL */
};

/*
 * Run a command without input, and read what it prints; its stderr is that of this process. argv[0]
 * is its path.  The text ends with a NUL; size counts it.
 */
enum vhpc_command_end vhpc_command_read(char *const argv[], char *text, size_t size);

#endif
