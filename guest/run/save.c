/* SPDX-License-Identifier: Apache-2.0 */
/* --vhpc-save: when the batch script has succeeded, its guest becomes an image. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "run.h"

extern char **environ;

enum { EXIT_NOT_SAVED = 1 };

/* `vhpc save JOBID NAME`, with its output on our stderr: stdout is that of the script. */
_Noreturn static void become_vhpc(const char *command, const char *job, const char *name)
{
    /* execve() takes pointers to char; it does not write. */
    char *const argv[] = {(char *)"vhpc", (char *)"save", (char *)job, (char *)name, NULL};
    sigset_t none;
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);

    if (null < 0 || dup2(null, STDIN_FILENO) < 0 || dup2(STDERR_FILENO, STDOUT_FILENO) < 0)
        _exit(EXIT_NOT_SAVED);
    (void)unsetenv("VHPC_RUN_SAVE");
    sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    (void)execve(command, argv, environ);
    (void)fprintf(stderr, "vhpc: cannot start %s: %s\n", command, strerror(errno));
    _exit(EXIT_NOT_SAVED);
}

/* The exit status of a child; -1 if it was ended by a signal. */
static int status_of(pid_t pid)
{
    int status = -1;

    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int run_save(const struct run_options *o, const struct front_result *r)
{
    const char *job = getenv("SLURM_JOB_ID");
    pid_t pid;

    if (!o->script || o->save == NULL || o->save_command == NULL || job == NULL)
        return -1;
    if (r->end != FRONT_EXITED || r->value != 0) {
        (void)fprintf(stderr, "vhpc: the guest is not saved as %s, because the script failed\n",
                      o->save);
        return -1;
    }
    pid = fork();
    if (pid == 0)
        become_vhpc(o->save_command, job, o->save);
    if (pid > 0 && status_of(pid) == 0)
        return -1;
    (void)fprintf(stderr, "vhpc: the script has succeeded, but its guest is not saved as %s\n",
                  o->save);
    return EXIT_NOT_SAVED;
}
