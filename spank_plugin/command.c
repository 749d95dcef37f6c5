/* SPDX-License-Identifier: Apache-2.0 */
#include "command.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdbool.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* The whole output if it fits, with a NUL; false if it does not, or cannot be read. */
static bool read_all(int fd, char *text, size_t size)
{
    size_t used = 0;

    for (;;) {
        char rest;
        ssize_t n = used < size - 1 ? read(fd, text + used, size - 1 - used) : read(fd, &rest, 1);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 || (n > 0 && used == size - 1))
            return false;
        if (n == 0)
            break;
        used += (size_t)n;
    }
    text[used] = '\0';
    return memchr(text, '\0', used) == NULL;
}

/* Start the command with its standard output in a pipe; its end to read, or -1 with errno. */
static int start(char *const argv[], pid_t *pid)
{
    posix_spawn_file_actions_t actions;
    int ends[2];
    int error;

    if (pipe2(ends, O_CLOEXEC) != 0)
        return -1;
    error = posix_spawn_file_actions_init(&actions);
    if (error == 0) {
        error = posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
        if (error == 0)
            error =
                posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
        if (error == 0)
            error = posix_spawn(pid, argv[0], &actions, NULL, argv, environ);
        (void)posix_spawn_file_actions_destroy(&actions);
    }
    (void)close(ends[1]);
    if (error == 0)
        return ends[0];
    (void)close(ends[0]);
    errno = error;
    return -1;
}

enum vhpc_command_end vhpc_command_read(char *const argv[], char *text, size_t size)
{
    int status = 0;
    pid_t pid;
    int fd = start(argv, &pid);
    bool complete;

    if (fd < 0)
        return VHPC_COMMAND_NOT_STARTED;
    complete = read_all(fd, text, size);
    (void)close(fd);
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            break;
    if (!complete) /* the closed pipe may have ended it, too */
        return VHPC_COMMAND_UNREADABLE;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? VHPC_COMMAND_DONE : VHPC_COMMAND_FAILED;
}
