/* SPDX-License-Identifier: Apache-2.0 */
#include "child.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "interpreter.h"
#include "readtext.h"

enum {
    FD_PARKING = 32, /* above all numbers that a task's fd can have */
    FD_COUNT = 1024  /* by default a process opens no more */
};

pid_t child_fork(int cgroup, bool *inside)
{
    *inside = false;
    if (cgroup >= 0) {
        struct clone_args args = {
            .flags = CLONE_INTO_CGROUP, .exit_signal = SIGCHLD, .cgroup = (__u64)cgroup};
        /* As fork() does; libc need not know, as there are no other threads. */
        long pid = syscall(SYS_clone3, &args, sizeof args);
        *inside = pid >= 0;
        if (pid >= 0)
            return (pid_t)pid;
    }
    return fork();
}

static void reset_signals(void)
{
    struct sigaction act = {.sa_handler = SIG_DFL};
    sigset_t none;
    for (int n = 1; n < NSIG; n++)
        if (n != SIGKILL && n != SIGSTOP)
            (void)sigaction(n, &act, NULL); /* EINVAL for the signals that libc reserves */
    sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
}

bool child_shed(unsigned first, pid_t parent)
{
    if (close_range(first, ~0U, 0) < 0) /* before Linux 5.9 */
        for (unsigned fd = first; fd < FD_COUNT; fd++)
            (void)close((int)fd);
    reset_signals();
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    return getppid() == parent;
}

/* Move each fd to its number; fds 0..2 that are not relayed become /dev/null. */
static int place_fds(const int fd[VHPC_FDS_MAX])
{
    int parked[VHPC_FDS_MAX];
    for (int i = 0; i < VHPC_FDS_MAX; i++) {
        int from = fd[i];
        if (from < 0 && i <= STDERR_FILENO)
            from = open("/dev/null", O_RDWR | O_CLOEXEC);
        parked[i] = from < 0 ? -1 : fcntl(from, F_DUPFD_CLOEXEC, FD_PARKING);
        if (parked[i] < 0 && (fd[i] >= 0 || i <= STDERR_FILENO))
            return errno;
    }
    for (int i = 0; i < VHPC_FDS_MAX; i++)
        if (parked[i] >= 0 && dup2(parked[i], i) < 0)
            return errno;
    return 0;
}

_Noreturn void child_run(const struct execspec *spec, const int fd[VHPC_FDS_MAX], int report_fd,
                         const struct child_ops *ops, void *arg)
{
    struct child_report report = {0};
    int parked = fcntl(report_fd, F_DUPFD_CLOEXEC, 2 * FD_PARKING);
    reset_signals();
    (void)setsid();
    report.number = parked < 0 ? errno : place_fds(fd);
    if (report.number == 0 && spec->tty && ioctl(STDIN_FILENO, TIOCSCTTY, 0) < 0)
        report.number = errno;
    if (report.number != 0)
        (void)snprintf(report.text, sizeof report.text, "couldn't set up stdio: %s",
                       strerror(report.number));
    if (report.number == 0)
        report.number = ops->prepare(spec, arg, &report);
    if (report.number == 0)
        report.number = ops->execute(spec, arg, &report);
    if (report.number == 0)
        report.number = EINVAL;
    (void)!write(parked < 0 ? report_fd : parked, &report, sizeof report);
    _exit(127);
}

static uint64_t nr_open(void)
{
    char text[32];
    uint64_t most;
    return read_text("/proc/sys/fs/nr_open", text, sizeof text) > 0 &&
                   text_is_number(text, 10, UINT64_MAX, &most)
               ? most
               : 1048576;
}

/* As much of the limit as this process may set. */
static void set_limit(const struct exec_rlimit *want)
{
    struct rlimit limit = {.rlim_cur = want->soft, .rlim_max = want->hard}, now;
    __rlimit_resource_t which = (__rlimit_resource_t)want->resource;
    if (want->resource >= RLIM_NLIMITS)
        return;
    if (which == RLIMIT_NOFILE && limit.rlim_max > nr_open())
        limit.rlim_max = nr_open();
    if (limit.rlim_cur > limit.rlim_max)
        limit.rlim_cur = limit.rlim_max;
    if (setrlimit(which, &limit) == 0 || getrlimit(which, &now) < 0)
        return;
    if (limit.rlim_max > now.rlim_max)
        limit.rlim_max = now.rlim_max;
    if (limit.rlim_cur > limit.rlim_max)
        limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(which, &limit);
}

void child_limits(const struct execspec *spec)
{
    if (spec->has_nice)
        (void)setpriority(PRIO_PROCESS, 0, spec->nice);
    for (size_t i = 0; i < spec->rlimit_count; i++)
        set_limit(&spec->rlimit[i]);
}

void child_chdir(const struct execspec *spec, const char *who)
{
    char text[PATH_MAX + 256];
    if (spec->cwd == NULL || chdir(spec->cwd) == 0)
        return;
    int n = snprintf(text, sizeof text, "%s: couldn't chdir to `%s': %s: going to /tmp instead\n",
                     who, spec->cwd, strerror(errno));
    if (n > 0)
        (void)!write(STDERR_FILENO, text, strnlen(text, sizeof text));
    if (chdir("/tmp") < 0)
        (void)!chdir("/");
}

static int try_search(const char *name, const char *path, char *const argv[], char *const envp[],
                      struct child_report *report)
{
    int result = ENOENT;
    for (const char *p = path; p != NULL; p = strchr(p, ':') != NULL ? strchr(p, ':') + 1 : NULL) {
        char full[PATH_MAX];
        size_t len = strcspn(p, ":");
        int n = snprintf(full, sizeof full, "%.*s%s%s", (int)(len < PATH_MAX ? len : PATH_MAX), p,
                         len > 0 ? "/" : "", name);
        if (n < 0 || (size_t)n >= sizeof full)
            continue;
        (void)execve(full, argv, envp);
        /* As execvp: a directory of PATH that cannot be searched does not end the search. */
        if (errno == EACCES)
            result = EACCES;
        else if (errno == ENOENT && interpreter_describe(full, report->text, sizeof report->text))
            return ENOENT;
        else if (errno != ENOENT && errno != ENOTDIR && errno != ESTALE && errno != ENODEV)
            return errno;
    }
    return result;
}

int child_execve(const char *name, const char *path, char *const argv[], char *const envp[],
                 struct child_report *report)
{
    static char *const empty[] = {NULL};
    int number;
    if (envp == NULL)
        envp = empty;
    report->text[0] = '\0';
    if (strchr(name, '/') == NULL) {
        number = name[0] == '\0' ? ENOENT : try_search(name, path, argv, envp, report);
    } else {
        (void)execve(name, argv, envp);
        number = errno;
        if (number == ENOENT)
            (void)interpreter_describe(name, report->text, sizeof report->text);
    }
    if (report->text[0] == '\0')
        (void)snprintf(report->text, sizeof report->text, "execve(): %s: %s", name,
                       strerror(number));
    return number;
}
