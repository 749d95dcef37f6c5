/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A signal to the process group of a script, as `scancel --full` sends it, is also for the
 * background commands of the script, which run in the guest. A process cannot tell a signal to its
 * group from one to itself, but another process of the group gets only the former. Therefore
 * scripts have a second process that only reports the signals that it gets.
 */
/* Decision: A helper in the script's process group */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "run.h"

enum { KEPT = STDERR_FILENO + 1 };

_Noreturn static void report_signals(int fd, pid_t parent)
{
    sigset_t all;
    int null = open("/dev/null", O_RDWR);
    /* Keep no file of the job open: its streams end with the script. */
    for (int i = 0; i <= STDERR_FILENO && null >= 0; i++)
        (void)dup2(null, i);
    if (dup2(fd, KEPT) < 0 || syscall(SYS_close_range, KEPT + 1U, ~0U, 0U) < 0)
        _exit(0);
    (void)prctl(PR_SET_NAME, "vhpc-run-group", 0, 0, 0);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    (void)sigfillset(&all);
    while (getppid() == parent) {
        int number = sigwaitinfo(&all, NULL);
        uint8_t byte = (uint8_t)number;
        if (number > 0 && write(KEPT, &byte, 1) != 1)
            break;
    }
    _exit(0);
}

static pid_t teller = -1;

void run_unwatch_group(void)
{
    /* Its pid is not reused until it was waited for. */
    if (teller <= 0 || waitpid(teller, NULL, WNOHANG) != 0 || kill(teller, SIGKILL) < 0)
        return;
    while (waitpid(teller, NULL, 0) < 0 && errno == EINTR)
        ;
    teller = -1;
}

int run_watch_group(void)
{
    int ends[2];
    sigset_t all, before;
    pid_t parent = getpid();
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0)
        return -1;
    /* Blocked before it starts, so that no signal can end it. */
    (void)sigfillset(&all);
    (void)sigprocmask(SIG_BLOCK, &all, &before);
    teller = fork();
    if (teller == 0)
        report_signals(ends[1], parent);
    (void)sigprocmask(SIG_SETMASK, &before, NULL);
    (void)close(ends[1]);
    if (teller > 0)
        return ends[0];
    (void)close(ends[0]);
    return -1;
}
