/* SPDX-License-Identifier: Apache-2.0 */
/* The seccomp filter that reports calls for locks (seccomp_unotify(2)); all other calls pass. */
#ifndef VHPC_LOCKS_FILTER_H
#define VHPC_LOCKS_FILTER_H

#include <linux/audit.h>

#if defined __x86_64__
#define FILTER_ARCH AUDIT_ARCH_X86_64
#elif defined __aarch64__
#define FILTER_ARCH AUDIT_ARCH_AARCH64
#else
#error "unknown architecture"
#endif

/* System calls and commands of 32-bit programs on x86-64, which also have F_SETLK and its
 * relatives. */
enum {
    FILTER_FCNTL_I386 = 55,
    FILTER_FLOCK_I386 = 143,
    FILTER_FCNTL64_I386 = 221,
    F_GETLK_I386 = 12,
    F_SETLK_I386 = 13,
    F_SETLKW_I386 = 14,
};

/*
 * Install it for this process and those that it starts from now on. Returns the descriptor of the
 * reports, or -errno; -ENOSYS: in this kernel a reported call cannot continue (before Linux 5.5).
 */
int filter_install(void);

#endif
