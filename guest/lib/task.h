/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The executor's end of a command: a program, its streams and its end.
 *
 * The agent uses it for the programs of sessions, vhpc-run for host calls. When the main process
 * has ended, its other processes are killed, the pipes are read to their ends, and only then EXIT
 * is sent: no output of the program is lost.
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
    /* Kill the processes that the main process left behind; it has been reaped (or aborted). */
    void (*kill_rest)(struct task *);
    /* Deliver a signal of the initiator to the main process; NULL: by kill(). */
    void (*signal)(struct task *, int number);
    /* Deliver a signal to the other processes of its process group; NULL: not possible. */
    void (*signal_group)(struct task *, int number);
    /* Directory of the cgroup in which the main process starts; -1 or NULL: none. */
    int (*open_cgroup)(const struct task *);
    /* Add fields to STARTED, and to EXIT; NULL: none. */
    void (*started_fields)(struct task *, struct buf *);
    void (*exit_fields)(struct task *, struct buf *);
    int abort_signal; /* signal to the main process when the initiator has closed the command */
};

struct task {
    struct exchange exchange;
    const struct task_ops *ops;
    void *arg;
    pid_t pid;
    bool in_cgroup; /* in the child: it was started in the cgroup */
    int status;     /* of waitpid, once reaped */
    bool reported;  /* exec has succeeded or failed */
    bool failed;    /* execve has failed, and ERROR was sent */
    bool reaped;
    bool aborted;
    bool detached;       /* it has no initiator until task_attach(), and sends nothing */
    const char *refusal; /* text of the ERROR that replaces EXIT; NULL = none */
    int refusal_number;  /* ... and its errno */
    bool finished; /* nothing is left; the owner may free the task between two turns of the loop */
    int master;    /* pty, -1 = none */
    struct source report; /* pipe on which the child reports that execve has failed */
    long long idle_since; /* ms; 0 = not idle */
    long long aborted_at;
};

/*
 * Fork and start the program. If that fails, ERROR was sent and *t is finished; returns -errno only
 * if the connection itself has failed.
 */
int task_start(struct task *t, const struct task_ops *ops, void *arg, struct loop *loop,
               struct chan *chan, uint32_t session, uint32_t call, const struct flow *flow,
               const struct execspec *spec);
/* A frame of the initiator after EXEC; 0 or -errno (-EPROTO: a violation by the initiator). */
int task_frame(struct task *t, const struct frame *f);
/* waitpid() has returned t->pid. */
void task_reaped(struct task *t, int status);
/*
 * End the task because it has done what it may not do: its output is sent, and then ERROR with this
 * errno and text instead of EXIT. The text stays owned by the caller.
 */
void task_refuse(struct task *t, int number, const char *text);
/*
 * Another initiator takes over a detached task, by its own EXEC: its session and its flow. STARTED
 * is sent again, and the end of each stream that has ended. 0 or -errno.
 */
int task_attach(struct task *t, uint32_t session, const struct flow *flow);
/* The initiator is gone: kill all processes of the task and send nothing more. */
void task_abort(struct task *t);
/* Handles deadlines; to be called several times per second while tasks exist. */
void task_tick(struct task *t, long long now);

#endif
