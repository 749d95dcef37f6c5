/* SPDX-License-Identifier: Apache-2.0 */
/* The child side of starting a program: between fork and execve. */
#ifndef VHPC_CHILD_H
#define VHPC_CHILD_H

#include <stdbool.h>
#include <sys/types.h>

#include "execspec.h"

/* Report of a child that could not execute its program. */
struct child_report {
    int number; /* errno */
    char text[508];
};

struct child_ops {
    /*
     * Set up the child: cgroup, limits, identity, working directory. Returns 0, or an errno with
     * report->text filled in.
     */
    int (*prepare)(const struct execspec *spec, void *arg, struct child_report *report);
    /* execve; returns only on failure, with the errno, report->text filled in. */
    int (*execute)(const struct execspec *spec, void *arg, struct child_report *report);
};

/*
 * fork(), but the child starts in the cgroup v2 whose directory is open as `cgroup` (-1: none);
 * *inside says whether it did. Not before Linux 5.7, and not if the cgroup refuses it. To move a
 * process into a cgroup takes the kernel an RCU grace period, some 20 ms: much more than all other
 * steps of a start.
 */
pid_t child_fork(int cgroup, bool *inside);

/*
 * Never returns. `fd` has the child's ends by number (-1: none); with tty, fd[0] is the pty's slave
 * and becomes the controlling terminal. report_fd is close-on-exec: if it closes without a report,
 * execve has succeeded.
 */
_Noreturn void child_run(const struct execspec *spec, const int fd[VHPC_FDS_MAX], int report_fd,
                         const struct child_ops *ops, void *arg);

/*
 * For a child that is a helper of this program, and starts no task: close all descriptors from
 * `first` on, reset the signals, and let the kernel end it with its parent (a later change of its
 * uid would undo that). False: the parent has ended.
 */
bool child_shed(unsigned first, pid_t parent);

/* Set the niceness and the limits of spec, as far as this process may. */
void child_limits(const struct execspec *spec);

/*
 * Enter spec->cwd. If that fails, do as slurmstepd does: print a message on the task's stderr and
 * use /tmp. `who` is the prefix of the message.
 */
void child_chdir(const struct execspec *spec, const char *who);

/*
 * execve with a search of `path` (colon separated) if name has no slash. No fallback to a shell for
 * files without "#!" (slurmstepd has none either). Returns the errno to report.
 */
int child_execve(const char *name, const char *path, char *const argv[], char *const envp[],
                 struct child_report *report);

#endif
