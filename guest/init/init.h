/* SPDX-License-Identifier: Apache-2.0 */
/* vhpc-init: from the kernel's initramfs to the image's root.
 *
 * Every step either succeeds or ends the guest: what the host sees of a guest
 * that cannot boot is one line on the console and a machine that is off.
 */
#ifndef VHPC_INIT_H
#define VHPC_INIT_H

#include "options.h"

/* Where the three layers of the root are mounted while the initramfs is still "/". */
#define LOWER_DIR "/lower"
#define RW_DIR "/rw"
#define NEW_ROOT "/newroot"

#define AGENT_SOURCE "/vhpc-agent"
#define AGENT_TARGET "/run/vhpc/vhpc-agent"

/* Prints "vhpc-init: <what>[: <text of errno err>]" and powers the guest off.  err 0: no errno
 * text. */
_Noreturn void die(int err, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Mounts, or dies.  data may be NULL. */
void mount_or_die(const char *source, const char *target, const char *type, unsigned long flags,
                  const char *data);

/* Creates a directory (mode 0755 whatever the umask) unless it is there, or dies. */
void mkdir_or_die(const char *path);

/* Loads the modules named in /modules/load, in that order, or dies. */
void load_modules(void);

/* Waits for the root device, mounts it read-only below an overlay with a tmpfs on top, at NEW_ROOT.
 */
void mount_root(const struct init_options *options);

/* Mounts the new root's /run and puts the agent there. */
void install_agent(void);

/* Frees the initramfs and makes NEW_ROOT the root of this process. */
void switch_root(void);

#endif
