/* SPDX-License-Identifier: Apache-2.0 */
/* The bind operation: mounts a folder of a share at a second directory. */
/* Decision: Folders are mounted at second places in the guest */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <mntent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "agent.h"
#include "identity.h"
#include "mountpoint.h"
#include "shared.h"

/* Open a directory that the user can read, with the rights of the user; a descriptor or -errno. */
static int open_as(const struct identity *user, const char *path)
{
    gid_t *groups = calloc(user->group_count + 1, sizeof *groups);
    if (groups == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < user->group_count; i++)
        groups[i] = user->groups[i].gid;
    int fd = -EPERM;
    if (setgroups(user->group_count, groups) == 0 && setegid(user->gid) == 0 &&
        seteuid(user->uid) == 0) {
        fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0)
            fd = -errno;
    }
    free(groups);
    /* An agent that stayed the user could not set up anything more. */
    if (seteuid(0) < 0 || setegid(0) < 0 || setgroups(0, NULL) < 0)
        abort();
    return fd;
}

static bool is_at_or_below(const char *path, const char *top)
{
    size_t len = strlen(top);
    return strncmp(path, top, len) == 0 && (path[len] == '\0' || path[len] == '/');
}

/* Permit no writes by way of this directory: in no share that is mounted there or below it. */
static int deny_writes(const char *top)
{
    FILE *f = setmntent("/proc/self/mounts", "re");
    if (f == NULL)
        return -errno;
    int rc = 0;
    for (struct mntent *m; rc == 0 && (m = getmntent(f)) != NULL;)
        if (is_at_or_below(m->mnt_dir, top) &&
            mount(NULL, m->mnt_dir, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV,
                  NULL) < 0)
            rc = -errno;
    (void)endmntent(f);
    return rc;
}

/* 0: to be mounted, 1: it is mounted already, or -errno. */
static int prepare(int fd, const char *path, bool read_only, char real[PATH_MAX], const char **why)
{
    struct stat source, there;
    struct statvfs fs;
    int rc = mountpoint_make(path, real);
    if (rc == -EINVAL)
        *why = "links of the image lead to a directory of the guest's own system";
    if (rc < 0)
        return rc;
    if (fstat(fd, &source) < 0 || stat(real, &there) < 0 || statvfs(real, &fs) < 0)
        return -errno;
    if (source.st_dev == there.st_dev && source.st_ino == there.st_ino &&
        (!read_only || (fs.f_flag & ST_RDONLY) != 0))
        return 1;
    if (!path_is_shared(real))
        return 0;
    *why = "it is in a shared folder";
    return -EBUSY;
}

static int bind_fd(int fd, const char *path, bool read_only, const char **why)
{
    char from[64], real[PATH_MAX];
    int rc = prepare(fd, path, read_only, real, why);
    if (rc != 0)
        return rc < 0 ? rc : 0;
    (void)snprintf(from, sizeof from, "/proc/self/fd/%d", fd);
    /* With the shares below it: one that is read-only stays so. */
    if (mount(from, real, NULL, MS_BIND | MS_REC, NULL) < 0)
        return -errno;
    rc = read_only ? deny_writes(real) : 0;
    if (rc < 0)
        (void)umount2(real, MNT_DETACH);
    return rc;
}

int bind_folder(const struct agent *a, const struct identity *user, const char *source,
                const char *path, bool read_only, char *text, size_t size)
{
    char own[64];
    if (!mountpoint_allowed(path) || source[0] != '/') {
        (void)snprintf(
            text, size,
            "a folder cannot be mounted on %.200s, a directory of the guest's own system", path);
        return -EINVAL;
    }
    if (!a->system)
        return 0;
    int fd = open_as(user, source);
    if (fd < 0) {
        (void)snprintf(text, size, "the user cannot open %.200s: %s", source, strerror(-fd));
        return fd;
    }
    (void)snprintf(own, sizeof own, "/proc/self/fd/%d", fd);
    const char *why = NULL;
    int rc = -EXDEV;
    if (path_is_shared(own))
        rc = bind_fd(fd, path, read_only, &why);
    else
        why = "it is in no shared folder";
    if (rc < 0)
        (void)snprintf(text, size, "cannot mount %.160s at %.160s: %s", source, path,
                       why != NULL ? why : strerror(-rc));
    (void)close(fd);
    return rc;
}
