/* SPDX-License-Identifier: Apache-2.0 */
#include "directory.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINKS_MAX = 40 }; /* as the kernel follows, path_resolution(7) */

static int make(const char *path, mode_t mode, unsigned links);

/* Make what a link leads to. */
static int make_target(const char *link, mode_t mode, unsigned links)
{
    char target[PATH_MAX], path[PATH_MAX];
    const ssize_t n = readlink(link, target, sizeof target - 1);
    if (n < 0)
        return errno == EINVAL ? -ENOTDIR : -errno;
    if (links == LINKS_MAX)
        return -ELOOP;
    target[n] = '\0';
    const int above = target[0] == '/' ? 0 : (int)(strrchr(link, '/') - link + 1);
    if (snprintf(path, sizeof path, "%.*s%s", above, link, target) >= (int)sizeof path)
        return -ENAMETOOLONG;
    return make(path, mode, links + 1);
}

static int make(const char *path, mode_t mode, unsigned links)
{
    char part[PATH_MAX];
    struct stat st;
    const size_t len = strlen(path);
    if (path[0] != '/' || len >= sizeof part)
        return path[0] != '/' ? -EINVAL : -ENAMETOOLONG;
    for (size_t i = 1; i <= len; i++) {
        if ((path[i] != '/' && path[i] != '\0') || path[i - 1] == '/')
            continue;
        memcpy(part, path, i);
        part[i] = '\0';
        if (mkdir(part, mode) == 0)
            continue;
        if (errno != EEXIST)
            return -errno;
        if (stat(part, &st) == 0) {
            if (!S_ISDIR(st.st_mode))
                return -ENOTDIR;
            continue;
        }
        const int rc = errno == ENOENT ? make_target(part, mode, links) : -errno;
        if (rc < 0)
            return rc;
    }
    return 0;
}

int directory_make(const char *path, mode_t mode)
{
    return make(path, mode, 0);
}

int directory_make_private(const char *path, uid_t uid, gid_t gid)
{
    struct stat st;
    if (stat(path, &st) == 0)
        return 0;
    int rc = directory_make(path, 0755);
    if (rc == 0 && (chmod(path, 0700) < 0 || chown(path, uid, gid) < 0))
        rc = -errno;
    return rc;
}
