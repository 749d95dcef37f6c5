/* SPDX-License-Identifier: Apache-2.0 */
#include "tmpdir.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "directory.h"
#include "mountpoint.h"

#define VARIABLE "TMPDIR"

void tmpdir_make(const struct execspec *spec)
{
    char above[PATH_MAX];
    struct stat st;
    const char *path = execspec_getenv(spec, VARIABLE);
    if (path == NULL || !mountpoint_allowed(path) || stat(path, &st) == 0 || errno != ENOENT)
        return;
    (void)snprintf(above, sizeof above, "%.*s/", (int)(strrchr(path, '/') - path), path);
    /* chown only what did not exist: other tasks may have made it meanwhile */
    if (directory_make(above, 0755) == 0 && mkdir(path, 0700) == 0)
        (void)!lchown(path, spec->uid, spec->gid);
}

static int use_tmp(struct execspec *spec, const char *path, const char *why)
{
    char text[PATH_MAX + 256];
    int n = snprintf(text, sizeof text,
                     "vhpc-agent: error: " VARIABLE " [%s] cannot be used: %s\n"
                     "vhpc-agent: error: Setting " VARIABLE " to /tmp\n",
                     path, why);
    if (n > 0)
        (void)!write(STDERR_FILENO, text, strnlen(text, sizeof text - 1));
    execspec_drop_env(spec, VARIABLE "=");
    return execspec_add_env(spec, VARIABLE "=/tmp");
}

int tmpdir_check(struct execspec *spec)
{
    struct stat st;
    const char *path = execspec_getenv(spec, VARIABLE);
    if (path == NULL || mkdir(path, 0700) == 0)
        return 0;
    const int number = errno;
    if (stat(path, &st) < 0)
        return use_tmp(spec, path, strerror(number));
    if (!S_ISDIR(st.st_mode))
        return use_tmp(spec, path, strerror(ENOTDIR));
    return eaccess(path, W_OK | X_OK) < 0 ? use_tmp(spec, path, strerror(errno)) : 0;
}
