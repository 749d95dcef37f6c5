/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The executor's end of a command: a program, its streams, its end.
 *
 * The agent runs tasks of sessions with it, vhpc-run the host calls. When the
 * main process has ended the rest of it is killed, the pipes are read to their
 * ends, and only then EXIT is said: what the program wrote is never lost.
 */
#ifndef VHPC_TASK_H
#define VHPC_TASK_H

#include <stdbool.h>
#include <sys/types.h>

#include "child.h"
#include "exchange.h"

struct task;

struct task_ops {
    struct child_ops child;
    /* Kill what the main process left behind; it has been reaped (or aborted). */
    void (*kill_rest)(struct task *);
    /* Give the main process a signal of the initiator; NULL = kill() will do. */
    void (*signal)(struct task *, int number);
    /* The same for the others of its process group; NULL = it cannot be done. */
    void (*signal_group)(struct task *, int number);
    /* Directory of the cgroup that the main process shall be born in; -1 or NULL: none. */
    int (*open_cgroup)(const struct task *);
    int abort_signal; /* how the main process is told that nobody wants it any more */
};

struct task {
    struct exchange exchange;
    const struct task_ops *ops;
    void *arg;
    pid_t pid;
    bool in_cgroup; /* in the child: it was born in the cgroup */
    int status;     /* of waitpid, once reaped */
    bool reported;  /* exec has succeeded or failed */
    bool failed;    /* it has failed: ERROR was sent */
    bool reaped;
    bool aborted;
    bool pmi_guarded;    /* said in STARTED: its use of PMI will be noticed */
    const char *refusal; /* it has done what it may not: ERROR with this text is its end */
    bool finished; /* nothing of it is left; the owner may free it between two turns of the loop */
    int master;    /* pty, -1 = none */
    struct source report; /* pipe on which the child tells that it could not exec */
    long long idle_since; /* ms; 0 = not idle */
    long long aborted_at;
};

/*
 * Fork and begin. On failure ERROR was sent and *t is finished; returns -errno
 * only when the connection itself failed.
 */
int task_start(struct task *t, const struct task_ops *ops, void *arg, struct loop *loop,
               struct chan *chan, uint32_t session, uint32_t call, const struct flow *flow,
               const struct execspec *spec);
/* A frame of the initiator after EXEC; 0 or -errno (-EPROTO: the initiator broke the rules). */
int task_frame(struct task *t, const struct frame *f);
/* waitpid() has returned t->pid. */
void task_reaped(struct task *t, int status);
/*
 * End it, as it has done what it may not: what it has written is sent, and then
 * ERROR with this text (which stays the caller's) in place of EXIT.
 */
void task_refuse(struct task *t, const char *text);
/* The initiator is gone: kill all of it, send nothing more. */
void task_abort(struct task *t);
/* To be called a few times a second while tasks exist: deadlines. */
void task_tick(struct task *t, long long now);

#endif
