/* SPDX-License-Identifier: Apache-2.0 */
/* Mounts of shared folders, as /proc/PID/mountinfo has them (proc(5)). */
#ifndef VHPC_LOCKS_MOUNTS_H
#define VHPC_LOCKS_MOUNTS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct mount_entry {
    int id, parent;
    dev_t device;
    bool virtiofs;
    char *root;   /* path of the file system that is mounted */
    char *point;  /* where */
    char *source; /* tag of a share */
};

struct mounts {
    struct mount_entry *entry;
    size_t count;
};

/* 0 or -errno. */
int mounts_read(struct mounts *m, const char *file);
void mounts_free(struct mounts *m);
/*
 * Tag of the share that the file system is part of, NULL if it is not part of one; valid until
 * mounts_free. A mount inside of a share on the host is part of the share.
 */
const char *mounts_tag(const struct mounts *m, dev_t device);
/*
 * Path of a file in its share, without the first slash ("." is the share), from its path in the
 * guest and its mount's id. 0, or -ENOENT: not known.
 */
int mounts_locate(const struct mounts *m, int id, const char *path, char *out, size_t size);

#endif
