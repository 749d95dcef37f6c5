/* SPDX-License-Identifier: Apache-2.0 */
/* /etc/hosts: lines of the job, and at the end a block with those of the job's cluster. */
#ifndef VHPC_HOSTS_H
#define VHPC_HOSTS_H

#include "buf.h"

#define HOSTS_FILE "/etc/hosts"

/* Write a new file: lines, then the block (may be empty, without its marks). 0 or -errno. */
int hosts_write(const char *path, struct buf *lines, const char *block);
/* Replace the block of a file; other lines stay, as users have changed them. 0 or -errno. */
int hosts_put_block(const char *path, const char *block);

#endif
