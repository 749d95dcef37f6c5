/* SPDX-License-Identifier: Apache-2.0 */
/* The files on which this guest has locks on the node, and their modes there. */
#ifndef VHPC_LOCKS_FILES_H
#define VHPC_LOCKS_FILES_H

#include <stdbool.h>
#include <sys/types.h>

#include "map.h"
#include "node.h"

struct locked_file {
    bool used;
    dev_t device;
    ino_t inode;
    char *tag, *path;
    struct locks_map held[LOCKS_KINDS];   /* on the node */
    struct locks_map needed[LOCKS_KINDS]; /* by programs of this guest, now or soon */
    long long idle_ms;                    /* nothing is held since then; 0: something is */
};

struct locked_files {
    struct locked_file file[LOCKS_FILES];
    size_t used; /* files in use are in front of it, perhaps with gaps */
    struct locks_node node;
};

/* A file in use, or NULL. */
struct locked_file *files_find(struct locked_files *f, dev_t device, ino_t inode);
/* A new file; NULL: too many, or no memory. */
struct locked_file *files_add(struct locked_files *f, dev_t device, ino_t inode, const char *tag,
                              const char *path);
/*
 * Raise the modes of a range on the node. 0, or -errno: -EAGAIN if somebody else has a lock. Sets
 * *asked if the node was asked, and so others may have had the file.
 */
int files_raise(struct locked_files *f, struct locked_file *l, uint8_t kind, struct locks_range r,
                bool *asked);
/*
 * The first lock of others on the node in the way of the range; mode LOCKS_FREE: none. 0 or
 * -errno.
 */
int files_test(struct locked_files *f, struct locked_file *l, struct locks_range r,
               struct locks_range *other);
/* Forget what is held: the node's end is another one. */
void files_hold_nothing(struct locked_files *f);
/* Forget what is needed. */
void files_need_nothing(struct locked_files *f);
/* Add the locks of a file such as /proc/locks to what is needed. 0 or -errno. */
int files_need_locks(struct locked_files *f, const char *name);
/*
 * Make the modes on the node those that are needed. A file without locks stays open there for a
 * moment: programs that use it often lock it again. True if a mode has changed.
 */
bool files_settle(struct locked_files *f, long long now);

#endif
