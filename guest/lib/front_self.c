/* A front's own process: what of it goes to the program, and how it ends. */
#include "front.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

extern char **environ;

enum { EXIT_REFUSED = 126, EXIT_LOST = 125 };

/* A closed stdio fd would be given to the next file we open. */
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

int front_describe_self(struct execspec *spec)
{
    char cwd[PATH_MAX];
    fill_stdio();
    spec->fd_dir[0] = VHPC_FD_IN;
    spec->fd_dir[1] = VHPC_FD_OUT;
    spec->fd_dir[2] = VHPC_FD_OUT;
    spec->uid = (uint32_t)geteuid();
    spec->gid = (uint32_t)getegid();
    spec->umask = (uint32_t)umask(0);
    (void)umask((mode_t)spec->umask);
    spec->has_umask = true;
    if (getcwd(cwd, sizeof cwd) != NULL && (spec->cwd = strdup(cwd)) == NULL)
        return -ENOMEM;
    for (char **e = environ; e != NULL && *e != NULL; e++)
        if (execspec_add_env(spec, *e) < 0)
            return -ENOMEM;
    spec->tty = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO);
    if (!spec->tty)
        return 0;
    (void)ioctl(STDIN_FILENO, TIOCGWINSZ, &spec->winsize);
    spec->has_termios = tcgetattr(STDIN_FILENO, &spec->termios) == 0;
    if (isatty(STDERR_FILENO))
        spec->fd_dir[2] = 0; /* all three are the pty */
    return 0;
}

/* Die of the signal, so that our parent sees what it would have seen of the program. */
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
