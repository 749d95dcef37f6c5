/* SPDX-License-Identifier: Apache-2.0 */
/* The process of a front: what the program takes over from it, and how it ends. */
#include "front.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/kcmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

extern char **environ;

enum { EXIT_REFUSED = 126, EXIT_LOST = 125 };

/* If a stdio fd is closed, the next file that we open would get its number. */
static void fill_stdio(void)
{
    for (int fd = 0; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF)
            continue;
        int null = open("/dev/null", O_RDWR);
        if (null >= 0 && null != fd) {
            (void)dup2(null, fd);
            (void)close(null);
        }
    }
}

/*
 * Whether the program cannot read or write anything there. Then the other side can use its
 * own.
 */
static bool is_null(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISCHR(st.st_mode) && st.st_rdev == makedev(1, 3);
}

/* Whether fds 1 and 2 go to one stream of bytes, so that their order matters. */
static bool is_joined(void)
{
    struct stat out, err;
    if (fstat(STDOUT_FILENO, &out) < 0 || fstat(STDERR_FILENO, &err) < 0 ||
        out.st_dev != err.st_dev || out.st_ino != err.st_ino)
        return false;
    if (!S_ISREG(out.st_mode))
        return true;
    /* A file that was opened twice has two positions, unless both append. */
    if ((fcntl(STDOUT_FILENO, F_GETFL) & fcntl(STDERR_FILENO, F_GETFL) & O_APPEND) != 0)
        return true;
    return syscall(SYS_kcmp, getpid(), getpid(), KCMP_FILE, STDOUT_FILENO, STDERR_FILENO) == 0;
}

static void describe_limits(struct execspec *spec)
{
    for (int i = 0; i < (int)RLIM_NLIMITS && spec->rlimit_count < EXEC_RLIMITS_MAX; i++) {
        struct rlimit limit;
        if (getrlimit((__rlimit_resource_t)i, &limit) == 0)
            spec->rlimit[spec->rlimit_count++] = (struct exec_rlimit){
                .resource = (uint32_t)i, .soft = limit.rlim_cur, .hard = limit.rlim_max};
    }
    errno = 0;
    int nice_value = getpriority(PRIO_PROCESS, 0);
    if (errno == 0) {
        spec->has_nice = true;
        spec->nice = nice_value;
    }
}

int front_describe_self(struct execspec *spec)
{
    char cwd[PATH_MAX];
    fill_stdio();
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (!is_null(fd))
            spec->fd_dir[fd] = fd == STDIN_FILENO ? VHPC_FD_IN : VHPC_FD_OUT;
    spec->joined = spec->fd_dir[1] != 0 && is_joined();
    spec->uid = (uint32_t)geteuid();
    spec->gid = (uint32_t)getegid();
    spec->umask = (uint32_t)umask(0);
    (void)umask((mode_t)spec->umask);
    spec->has_umask = true;
    describe_limits(spec);
    if (getcwd(cwd, sizeof cwd) != NULL && (spec->cwd = strdup(cwd)) == NULL)
        return -ENOMEM;
    for (char **e = environ; e != NULL && *e != NULL; e++)
        if (execspec_add_env(spec, *e) < 0)
            return -ENOMEM;
    spec->tty = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO);
    spec->tty_out = !spec->tty && isatty(STDOUT_FILENO);
    if (!spec->tty && !spec->tty_out)
        return 0;
    (void)ioctl(STDOUT_FILENO, TIOCGWINSZ, &spec->winsize);
    spec->has_termios = tcgetattr(STDOUT_FILENO, &spec->termios) == 0;
    if (!spec->tty)
        return 0;
    spec->joined = false;
    /* With a terminal, an absent fd 2 means the terminal as well. */
    spec->fd_dir[2] = isatty(STDERR_FILENO) ? 0 : VHPC_FD_OUT;
    return 0;
}

/* End by the signal, so that our parent sees the same as of the program. */
static void die_of(int number)
{
    struct rlimit no_core = {0, 0};
    sigset_t only;
    (void)setrlimit(RLIMIT_CORE, &no_core);
    (void)prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    if (number != SIGKILL && number != SIGSTOP)
        (void)signal(number, SIG_DFL);
    sigemptyset(&only);
    sigaddset(&only, number);
    (void)kill(getpid(), number);
    (void)sigprocmask(SIG_UNBLOCK, &only, NULL);
}

_Noreturn void front_exit_as(const struct front_result *r, const char *who)
{
    switch (r->end) {
    case FRONT_EXITED:
        exit(r->value);
    case FRONT_SIGNALED:
        die_of(r->value);
        exit(128 + r->value);
    case FRONT_EXEC_FAILED:
        (void)fprintf(stderr, "%s: %s\n", who, r->text);
        exit(r->value > 0 ? r->value : EXIT_REFUSED);
    case FRONT_REFUSED:
    case FRONT_INTERNAL:
        (void)fprintf(stderr, "%s: %s\n", who, r->text);
        exit(EXIT_REFUSED);
    case FRONT_LOST:
    case FRONT_TIMEOUT:
        break;
    }
    (void)fprintf(stderr, "%s: %s\n", who, r->text);
    exit(EXIT_LOST);
}
