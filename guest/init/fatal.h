/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Steps of vhpc-init that succeed or end the guest: the host sees one line on the console of a
 * guest that cannot boot, and then the guest is off.
 */
#ifndef VHPC_INIT_FATAL_H
#define VHPC_INIT_FATAL_H

/*
 * Prints "vhpc-init: <what>[: <text of errno err>]" and powers the guest off.  err 0: without a
 * text of errno.
 */
_Noreturn void die(int err, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Mounts, or dies.  data may be NULL. */
void mount_or_die(const char *source, const char *target, const char *type, unsigned long flags,
                  const char *data);

/* Creates a directory (mode 0755 whatever the umask) unless it exists, or dies. */
void mkdir_or_die(const char *path);

#endif
