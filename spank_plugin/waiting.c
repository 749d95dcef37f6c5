/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: A process started by the plugin shows the boot's progress */
#include "waiting.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* -Q may stand among other short options; a program's own -Q is taken for it, which does no
 * harm. */
static bool asks_for_quiet(const char *word)
{
    if (strcmp(word, "--quiet") == 0)
        return true;
    return word[0] == '-' && word[1] != '-' && strlen(word) < 8 && strchr(word, 'Q') != NULL;
}

bool vhpc_somebody_waits(const char *program, char *const *argv, const char *quiet, int fd)
{
    if (strcmp(program, "srun") != 0 && strcmp(program, "salloc") != 0)
        return false;
    if ((quiet != NULL && quiet[0] != '\0') || !isatty(fd))
        return false;
    for (size_t i = 1; argv[0] != NULL && argv[i] != NULL && strcmp(argv[i], "--") != 0; i++)
        if (asks_for_quiet(argv[i]))
            return false;
    return true;
}

int vhpc_own_arguments(char *text, size_t size, char **argv, size_t count)
{
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    size_t used = 0;
    size_t words = 0;
    ssize_t n = 1;

    argv[0] = NULL;
    if (fd < 0)
        return 0;
    while (used < size && (n = read(fd, text + used, size - used)) > 0)
        used += (size_t)n;
    (void)close(fd);
    /* an argument that is not whole is left out */
    while (used > 0 && text[used - 1] != '\0')
        used--;
    for (size_t at = 0; at < used && words < count - 1; at += strlen(text + at) + 1)
        argv[words++] = text + at;
    argv[words] = NULL;
    return (int)words;
}

bool vhpc_waiter_word(char word[VHPC_WAITER_SIZE])
{
    unsigned char bytes[(VHPC_WAITER_SIZE - 1) / 2];

    if (getrandom(bytes, sizeof bytes, GRND_NONBLOCK) != (ssize_t)sizeof bytes)
        return false;
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(word + 2 * i, 3, "%02x", bytes[i]);
    return true;
}

/* In the new process: it keeps the terminal as stderr, and nothing else of the command. */
static _Noreturn void become_watcher(const char *command, char *const argv[])
{
    int null = open("/dev/null", O_RDWR);

    if (null < 0 || dup2(null, STDIN_FILENO) < 0 || dup2(null, STDOUT_FILENO) < 0)
        _exit(127);
    if (syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, 0) == 0)
        (void)execve(command, argv, environ);
    _exit(127);
}

void vhpc_watch_boot(const char *command, const char *word)
{
    char pid[16];
    char *const argv[] = {(char *)command, "boot-watch", (char *)word, pid, NULL};
    pid_t child;

    snprintf(pid, sizeof pid, "%ld", (long)getpid());
    /* Slurm's commands wait for any of their children: it must not be one. */
    child = fork();
    if (child == 0) {
        pid_t watcher = fork();

        if (watcher == 0)
            become_watcher(command, argv);
        _exit(0);
    }
    while (child > 0 && waitpid(child, NULL, 0) < 0)
        if (errno != EINTR)
            break;
}
