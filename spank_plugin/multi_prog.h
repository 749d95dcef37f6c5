/* SPDX-License-Identifier: Apache-2.0 */
/* Configurations of srun --multi-prog.  This module does not know Slurm. */
#ifndef VHPC_SPANK_MULTI_PROG_H
#define VHPC_SPANK_MULTI_PROG_H

#include <stdbool.h>

/*
 * True if text is a configuration of srun --multi-prog: each line that is neither blank nor a
 * comment begins with a set of ranks and a program.
 */
bool vhpc_argv_is_multi_prog(const char *text);

#endif
