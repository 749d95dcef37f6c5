/* SPDX-License-Identifier: Apache-2.0 */
/* A thread that waits in a system call for locks, and the file it means; read from /proc. */
#ifndef VHPC_LOCKS_CALLER_H
#define VHPC_LOCKS_CALLER_H

#include <linux/seccomp.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "map.h"

/* Layouts of struct flock: that of this architecture, and those of 32-bit programs on x86-64. */
enum flock_layout { FLOCK_NATIVE, FLOCK_I386, FLOCK64_I386 };

struct lock_call {
    pid_t tid;
    int fd;
    uint8_t op;    /* LOCKS_SET or LOCKS_TEST; 0: not a call that concerns locks */
    uint8_t kind;  /* enum locks_kind */
    bool wait;     /* until the lock is free */
    uint64_t user; /* address of its struct flock */
    enum flock_layout layout;
    struct seccomp_data data;
    struct locks_range range; /* mode LOCKS_FREE: an unlock */
};

/* The kind of the call; caller_range reads the rest. */
struct lock_call caller_parse(const struct seccomp_notif *n);
/* The file of the call; 0 or -errno. */
int caller_stat(const struct lock_call *c, struct stat *st);
/* Its range and mode. 0, or -EINVAL: the kernel refuses the call. */
int caller_range(struct lock_call *c);
/* The answer of F_GETLK: somebody else's lock, of an unknown process. 0 or -errno. */
int caller_put_lock(const struct lock_call *c, const struct locks_range *other);
/* Path and mount of its file, for mounts_locate. 0 or -errno. */
int caller_path(const struct lock_call *c, char *path, size_t size, int *mount);
/* Let go of what this guest has cached of the file: somebody else may have changed it. */
void caller_refresh(const struct lock_call *c);
/* User time of the thread in clock ticks. */
uint64_t caller_ticks(pid_t tid);
/* Whether the thread may still be in the call, which it was allowed at `ticks`. */
bool caller_is_in(const struct lock_call *c, uint64_t ticks);

#endif
