/* SPDX-License-Identifier: Apache-2.0 */
/* Which paths of the guest are on folders that it shares with the hosts, by virtiofs. */
#ifndef VHPC_SHARED_H
#define VHPC_SHARED_H

#include <stdbool.h>

/* Whether the file or folder exists and is shared. */
bool path_is_shared(const char *path);

/*
 * Whether the host cannot have the same file: the path, or the folder of a file that does not exist
 * yet, exists in the guest and is not shared. Devices do not count. The path may have a file name
 * pattern of Slurm: what follows a '%' is ignored.
 */
bool path_is_local(const char *path);

#endif
