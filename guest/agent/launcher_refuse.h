/* SPDX-License-Identifier: Apache-2.0 */
#ifndef VHPC_LAUNCHER_REFUSE_H
#define VHPC_LAUNCHER_REFUSE_H

#include "launcher.h"

/*
 * If the daemons would be in guests without a network between them, write one line and exit with
 * the code of a refused MPI program, this process and the launcher.
 */
void launcher_refuse(const struct launch *launch);

#endif
