/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: The submitting command imports a source */
#include "source.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "image.h"
#include "text.h"

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
static int start(const char *command, const char *source, pid_t *pid)
{
    char *const argv[] = {(char *)command, "image", "resolve", "--", (char *)source, NULL};
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
            error = posix_spawn(pid, command, &actions, NULL, argv, environ);
        (void)posix_spawn_file_actions_destroy(&actions);
    }
    (void)close(ends[1]);
    if (error == 0)
        return ends[0];
    (void)close(ends[0]);
    errno = error;
    return -1;
}

void vhpc_source_list(const char *command, char *why, size_t size)
{
    char *const argv[] = {(char *)command, "image", "names", NULL};

    (void)execv(command, argv);
    snprintf(why, size, "couldn't list the images: %s: %s", command, strerror(errno));
}

bool vhpc_source_resolve(const char *command, const char *source, char image[VHPC_VALUE_SIZE],
                         char *why, size_t size)
{
    char shown[VHPC_SHOWN_SIZE];
    char answer[VHPC_VALUE_SIZE];
    const char *expected = NULL;
    int status = 0;
    pid_t pid;
    bool complete;
    int fd = start(command, source, &pid);

    vhpc_text_shown(source, shown, sizeof shown);
    if (fd < 0) {
        snprintf(why, size, "couldn't make an image of %s: %s: %s", shown, command,
                 strerror(errno));
        return false;
    }
    complete = read_all(fd, answer, sizeof answer);
    (void)close(fd);
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            break;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        snprintf(why, size, "there is no image of %s, so no job was created (the reason is above)",
                 shown);
        return false;
    }
    answer[strcspn(answer, "\n")] = '\0';
    if (!complete || vhpc_is_source(answer) || !vhpc_image_parse(answer, image, &expected) ||
        strcmp(image, VHPC_IMAGE_LIST) == 0) {
        image[0] = '\0';
        snprintf(why, size, "couldn't read the name of the image of %s that %s printed", shown,
                 command);
        return false;
    }
    return true;
}
