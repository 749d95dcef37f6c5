/* SPDX-License-Identifier: Apache-2.0 */
/* The root file system of the image, and the change to it. */
#ifndef VHPC_INIT_NEWROOT_H
#define VHPC_INIT_NEWROOT_H

#include "options.h"

/* Mount point of the guest's root while the initramfs is still "/". */
#define NEW_ROOT "/newroot"
/* Where install_agent() puts the agent, seen from the new root. */
#define AGENT_TARGET "/run/vhpc/vhpc-agent"

/* Waits for the root device and mounts it read-only, through dm-verity if it has a hash tree, below
 * an overlay whose upper layer is a tmpfs, which /dev/shm shares, or the guest's own disk; or dies.
 */
void mount_root(const struct init_options *options);

/* Mounts /run in the new root and copies the agent there, or dies. */
void install_agent(void);

/* Empties the initramfs and makes the new root the root of this process, or dies. */
void switch_root(void);

#endif
