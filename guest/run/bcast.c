/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files that came to this node while the job ran: slurmd writes the files of `srun --bcast=PATH`
 * and sbcast to the node, where the guest does not see them. If the guest has no program of that
 * name, and the node has one that the user owns and that is newer than the job's guests, vhpc-run
 * first copies it into the guest, with the libraries that `--send-libs` has put into its folder.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "child.h"
#include "run.h"

enum { LIBRARIES_MAX = 1024 };

/* Set for the second run of this program, after the copy, so that it does not try again. */
static const char again[] = "VHPC_RUN_COPIED";

/*
 * One task of a guest copies and the others wait for it, if the image has flock(1); otherwise each
 * task copies. Arguments: the file, its mode. The file appears as a whole or not at all.
 */
static char script[] = "mkdir -p \"${1%/*}/\" || exit\n"
                       "exec 9>\"$1.lock\" && { flock 9 2>/dev/null || :; }\n"
                       "if [ ! -e \"$1\" ]; then\n"
                       "    cat >\"$1.$$\" && chmod \"$2\" \"$1.$$\" && mv -f \"$1.$$\" \"$1\"\n"
                       "fi\n"
                       "code=$?; rm -f \"$1.$$\" \"$1.lock\"; exit $code\n";

static bool is_of_job(const struct stat *st)
{
    struct stat state;
    const char *path = getenv("VHPC_RUN_STATE");
    return S_ISREG(st->st_mode) && st->st_uid == geteuid() && path != NULL &&
           stat(path, &state) == 0 && st->st_ctim.tv_sec >= state.st_mtim.tv_sec;
}

/* In a process of its own, as this one's standard input is the program's. */
_Noreturn static void send_file(const char *socket, int fd, const char *path, mode_t mode)
{
    static struct front front;
    static struct execspec spec;
    char octal[16];
    char *argv[] = {"sh", "-c", script, "sh", (char *)path, octal};
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    (void)snprintf(octal, sizeof octal, "%o", (unsigned)mode & 0777U);
    if (null < 0 || dup2(fd, STDIN_FILENO) < 0 || dup2(null, STDOUT_FILENO) < 0)
        _exit(1);
    const struct run_options o = {.argv = argv, .argc = sizeof argv / sizeof argv[0]};
    if (run_describe(&o, &spec) < 0)
        _exit(1);
    front = (struct front){.spec = &spec, .timeout_ms = 10000, .group_fd = -1};
    struct front_result result = front_run(&front, socket);
    _exit(result.end == FRONT_EXITED ? result.value : 1);
}

static bool copy(const char *socket, const char *path)
{
    struct stat st;
    int status = -1, fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (fd >= 0 && fstat(fd, &st) == 0 && is_of_job(&st)) {
        pid_t pid = fork();
        if (pid == 0)
            send_file(socket, fd, path, st.st_mode);
        while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
            ;
        if (pid < 0)
            status = -1;
    }
    if (fd >= 0)
        (void)close(fd);
    return status == 0;
}

/* The files that --send-libs has put into PATH_libs. The loader reports one that is missing. */
static void copy_libraries(const char *socket, const char *path)
{
    char folder[PATH_MAX], name[PATH_MAX + NAME_MAX + 2];
    int left = LIBRARIES_MAX;
    if ((size_t)snprintf(folder, sizeof folder, "%s_libs", path) >= sizeof folder)
        return;
    DIR *dir = opendir(folder);
    if (dir == NULL)
        return;
    for (struct dirent *e; (e = readdir(dir)) != NULL && left-- > 0;) {
        (void)snprintf(name, sizeof name, "%s/%s", folder, e->d_name);
        if (e->d_name[0] != '.')
            (void)copy(socket, name);
    }
    (void)closedir(dir);
}

/* The guest has no such file; ENOENT is also the error of one whose interpreter is missing. */
static bool is_missing(const struct front_result *r, const char *path)
{
    struct child_report expected; /* cut as that of the guest */
    (void)snprintf(expected.text, sizeof expected.text, "execve(): %s: %s", path, strerror(ENOENT));
    return r->end == FRONT_EXEC_FAILED && r->value == ENOENT && strcmp(r->text, expected.text) == 0;
}

void run_copy_and_retry(const struct run_options *o, const struct front_result *r, char **argv)
{
    const char *path = o->argv[0];
    const char *node = getenv("SLURMD_NODENAME");
    struct stat st;
    if (path[0] != '/' || o->script || !is_missing(r, path) || getenv(again) != NULL ||
        stat(path, &st) < 0)
        return;
    if (copy(o->socket, path)) {
        copy_libraries(o->socket, path);
        if (setenv(again, "1", 1) == 0)
            (void)execv("/proc/self/exe", argv);
    }
    (void)fprintf(stderr, "vhpc: %s exists on the node %s but not in the guest of this job\n", path,
                  node != NULL ? node : "itself");
}
