/* SPDX-License-Identifier: Apache-2.0 */
/* Modes and groups of device nodes. */
#ifndef VHPC_AGENT_DEVNODES_H
#define VHPC_AGENT_DEVNODES_H

#include <sys/types.h>

#include "loop.h"

/*
 * Set modes and groups of the device nodes in the directory dev as udev does, with the group
 * numbers of the file groups. In images without udev nodes have the modes of the kernel, which
 * reserves most of them for root.
 */
void devnodes_apply(const char *dev, const char *groups);

/* Before the file groups gets another number for a group: give its device nodes that number. */
void devnodes_regroup(const char *dev, const char *groups, const char *name, gid_t number);

/*
 * The group of terminals, "tty" in the file groups: a user's sshd refuses terminals of another
 * group. Without one it is the number that distributions have.
 */
gid_t devnodes_terminal_group(const char *groups);

/* Apply them to nodes that appear later, too; 0 or -errno. */
int devnodes_watch(struct loop *loop);

#endif
