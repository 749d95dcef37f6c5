/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: The agent mounts a disk that has a mount point */
#include "mountpoint.h"

#include <errno.h>
#include <mntent.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "directory.h"

/* Nothing is mounted on these, and nothing below those in `trees`. */
static const char *const places[] = {"/", "/usr", "/var", "/usr/bin", "/usr/sbin", "/usr/libexec"};
static const char *const trees[] = {"/etc",  "/bin", "/sbin", "/lib",  "/dev",
                                    "/proc", "/sys", "/run",  "/boot", "/usr/lib"};

static bool is_forbidden(const char *path)
{
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++)
        if (strcmp(path, places[i]) == 0)
            return true;
    for (size_t i = 0; i < sizeof trees / sizeof trees[0]; i++) {
        size_t len = strlen(trees[i]);
        if (strncmp(path, trees[i], len) != 0)
            continue;
        if (path[len] == '\0' || path[len] == '/')
            return true;
        /* /lib32, /lib64, /libx32 and the same below /usr */
        bool lib = strcmp(trees[i] + len - 4, "/lib") == 0;
        if (lib && (strncmp(path + len, "32", 2) == 0 || strncmp(path + len, "64", 2) == 0 ||
                    strncmp(path + len, "x32", 3) == 0))
            return true;
    }
    return false;
}

/* Absolute, no empty, "." or ".." parts, no control characters. */
static bool is_normal(const char *path)
{
    if (path[0] != '/' || strlen(path) >= PATH_MAX)
        return false;
    for (const char *p = path; *p != '\0'; p++) {
        if ((unsigned char)*p < 0x20)
            return false;
        if (*p != '/')
            continue;
        size_t len = strcspn(p + 1, "/");
        if ((len == 0 && path[1] != '\0') || (len == 1 && p[1] == '.') ||
            (len == 2 && p[1] == '.' && p[2] == '.'))
            return false;
    }
    return true;
}

bool mountpoint_allowed(const char *path)
{
    return is_normal(path) && !is_forbidden(path);
}

int mountpoint_make(const char *path, char real[PATH_MAX])
{
    int rc = directory_make(path, 0755);
    if (rc == 0 && realpath(path, real) == NULL)
        rc = -errno;
    if (rc == 0 && is_forbidden(real))
        rc = -EINVAL; /* a symbolic link in the image leads to a protected directory */
    return rc;
}

bool mountpoint_has(const char *path, const char *type, const char *source)
{
    bool found = false;
    FILE *f = setmntent("/proc/self/mounts", "re");
    if (f == NULL)
        return false;
    for (struct mntent *m; (m = getmntent(f)) != NULL;)
        if (strcmp(m->mnt_dir, path) == 0) /* the last entry is the uppermost mount */
            found = strcmp(m->mnt_type, type) == 0 && strcmp(m->mnt_fsname, source) == 0;
    (void)endmntent(f);
    return found;
}
