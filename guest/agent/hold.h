/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hold of a guest whose state is about to be saved: programs are stopped and all of their
 * output is with the host, so that nothing is lost if the host's end is another one afterwards. The
 * batch script may have been started, and steps (steps.h); all else that depends on a process of
 * the host delays a hold.
 *
 * Before a guest is held it is prepared: programs run, and nothing begins that the host takes part
 * in. When all guests of a job are prepared, they may be held.
 */
#ifndef VHPC_HOLD_H
#define VHPC_HOLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "agent.h"

/* A request. */
struct hold_want {
    uint32_t op, request;
    uint32_t wait_ms;
    uint64_t time_ns; /* since the epoch */
    uint64_t serial;  /* of the checkpoint */
};

/*
 * The operations prepare, hold, release and resume. 0 (*later: the reply follows), or -errno with
 * one line in text; -ENOSYS: another operation.
 *
 * After a release all programs continue. A resume is for a guest that was restored: the clock is
 * set first. In both cases a batch script whose client is gone stays stopped until it is attached.
 */
int hold_perform(struct session *s, const struct hold_want *want, char *text, size_t size,
                 bool *later);
/* Continue between two turns of the loop; 0 or -errno. */
int hold_tick(struct agent *a, long long now, bool *work);
/*
 * The host's end is gone, or another one: its sessions are closed; only in a held guest the batch
 * script is kept, detached.
 */
void hold_new_host(struct agent *a);
/*
 * One clause about a lock of a program on a file of a share, by files such as /proc/locks and
 * /proc/self/mountinfo. False: there is none.
 */
bool hold_finds_lock(const char *locks, const char *mounts, char *text, size_t size);

#endif
