/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lock broker of a guest. The guest's kernel keeps the locks of its programs. The broker sees
 * each such call first (filter.h); the call continues when the guest has a lock on the node on the
 * same bytes that is at least as strong. So programs of one guest exclude each other by their
 * kernel, and programs of several guests and hosts by the file system of the nodes.
 *
 * A program need not say that it gives up a lock: it can close the file or end. So what the guest
 * holds on the node is compared, at times, with the table of the kernel, /proc/locks, and with the
 * calls that may still be on their way into it.
 */
#ifndef VHPC_LOCKS_BROKER_H
#define VHPC_LOCKS_BROKER_H

#include "caller.h"
#include "files.h"
#include "mounts.h"

enum { BROKER_WAITING = 1024, BROKER_GRANTS = 4096, BROKER_SHARES = 128 };

/* A call that continues, and may not have its lock yet. */
struct lock_grant {
    struct lock_call call;
    dev_t device;
    ino_t inode;
    uint64_t ticks;
};

/* A call that waits for a lock that somebody else has on the node. */
struct lock_wait {
    uint64_t id; /* of its report */
    struct lock_call call;
    long long since_ms, next_ms;
};

struct broker {
    int reports; /* descriptor of filter_install */
    struct locked_files files;
    struct mounts mounts;
    int mounts_changed; /* polled: /proc/self/mountinfo */
    struct {
        char tag[64];
        bool refuse;
    } share[BROKER_SHARES];
    size_t shares;
    struct lock_grant grant[BROKER_GRANTS];
    size_t grants;
    struct lock_wait wait[BROKER_WAITING];
    size_t waits;
    bool unlocked;                 /* a program has given up a lock since the last look */
    const char *path;              /* of the port */
    long long open_ms;             /* when a port that has closed is opened again */
    long long changed_ms, look_ms; /* the last change of what is held, and the next look at it */
};

/*
 * Serve the reports until no program is left; returns the exit status. If the port closes, it is
 * opened again: in a guest that was restored the node is another one, and nothing is held there.
 * SIGUSR1 says the same where the port does not seem to close.
 */
int broker_run(int port, const char *path, int reports);

#endif
