/* SPDX-License-Identifier: Apache-2.0 */
/* The child side of starting a program: between fork and execve. */
#ifndef VHPC_CHILD_H
#define VHPC_CHILD_H

#include <stdbool.h>
#include <sys/types.h>

#include "execspec.h"

/* What a child that could not become its program tells its parent. */
struct child_report {
    int number; /* errno */
    char text[508];
};

struct child_ops {
    /*
     * Become what the program shall run as: cgroup, limits, identity, working
     * directory. Returns 0, or an errno with report->text filled in.
     */
    int (*prepare)(const struct execspec *spec, void *arg, struct child_report *report);
    /* execve; returns only on failure, with the errno, report->text filled in. */
    int (*execute)(const struct execspec *spec, void *arg, struct child_report *report);
};

/*
 * fork(), but the child is born in the cgroup v2 whose directory is open as
 * `cgroup` (-1: none), and *inside then says so; not before Linux 5.7, and not
 * where the cgroup does not take it. To move a process into a cgroup takes the
 * kernel an RCU grace period, some 20 ms: much more than all else at its start.
 */
pid_t child_fork(int cgroup, bool *inside);

/*
 * Never returns. `fd` are the child's ends by number (-1: none); with tty, fd[0]
 * is the pty's slave and becomes the controlling terminal. report_fd is
 * close-on-exec: silence there means that execve has succeeded.
 */
_Noreturn void child_run(const struct execspec *spec, const int fd[VHPC_FDS_MAX], int report_fd,
                         const struct child_ops *ops, void *arg);

/* The niceness and the limits of spec, as far as this process may have them. */
void child_limits(const struct execspec *spec);

/*
 * Enter spec->cwd. Where that fails, do as slurmstepd does: say so on the
 * task's stderr and go on in /tmp. `who` begins the message.
 */
void child_chdir(const struct execspec *spec, const char *who);

/*
 * execve with a search of `path` (colon separated) when name has no slash; no
 * fallback to a shell for files without "#!" (slurmstepd has none either).
 * Returns the errno to report.
 */
int child_execve(const char *name, const char *path, char *const argv[], char *const envp[],
                 struct child_report *report);

#endif
