/* SPDX-License-Identifier: Apache-2.0 */
/* Files that the agent writes for the guest's programs. */
#ifndef VHPC_FILE_H
#define VHPC_FILE_H

#include <sys/types.h>

/* Write a new file. What was at path before is removed, and a link there is not followed. 0 or
 * -errno. */
int write_file(const char *path, mode_t mode, const char *content);

#endif
