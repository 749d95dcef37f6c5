/* SPDX-License-Identifier: Apache-2.0 */
/* The shared directory: opened as the user, checked by its real path. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "confine.h"

/*
 * Only the file system ids change: the process keeps root's real and effective ids, so the user can
 * neither signal nor trace it while it follows the user's paths. Root's file capabilities change
 * with the fsuid (capabilities(7), "Effect of user ID changes on capabilities").
 */
void confine_as_user(const struct confine *c)
{
    (void)setfsgid(c->gid);
    (void)setfsuid(c->uid);
}

void confine_as_root(void)
{
    (void)setfsuid(0);
    (void)setfsgid(0);
}

int confine_open_share(const struct confine *c, int *code)
{
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s/.", c->share);

    *code = CONFINE_ABSENT;
    if (length < 0 || (size_t)length >= sizeof path) {
        (void)confine_report(c, *code, "absent", "%s", strerror(ENAMETOOLONG));
        return -1;
    }
    confine_as_user(c);
    /* "/." requires the right to enter the directory, and triggers autofs. */
    int fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int error = errno;
    confine_as_root();
    if (fd < 0)
        (void)confine_report(c, *code, "absent", "%s", strerror(error));
    return fd;
}

static bool lies_in(const char *path, const char *directory)
{
    size_t length = strlen(directory);

    while (length > 1 && directory[length - 1] == '/')
        length--;
    return strncmp(path, directory, length) == 0 && (path[length] == '\0' || path[length] == '/');
}

/*
 * File systems that give access to processes or the kernel.  The list has types and not paths,
 * because a chroot has its /proc elsewhere.
 */
static bool is_of_the_kernel(const struct statfs *fs)
{
    static const unsigned long types[] = {
        PROC_SUPER_MAGIC, SYSFS_MAGIC,      CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, DEBUGFS_MAGIC,
        TRACEFS_MAGIC,    SECURITYFS_MAGIC, DEVPTS_SUPER_MAGIC, BPF_FS_MAGIC,        PSTOREFS_MAGIC,
        EFIVARFS_MAGIC,   SELINUX_MAGIC,    SMACK_MAGIC,        BINFMTFS_MAGIC,      NSFS_MAGIC,
    };

    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if ((unsigned long)fs->f_type == types[i])
            return true;
    return false;
}

int confine_check_share(const struct confine *c, int share, bool say)
{
    char link[64];
    char path[PATH_MAX];
    struct statfs fs;

    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", share);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return confine_report(c, CONFINE_FAILED, "failed", "cannot resolve %s: %s", c->share,
                              strerror(errno));
    path[length] = '\0';
    if (say)
        (void)confine_report(c, 0, "opened", "%s", path);
    if (fstatfs(share, &fs) != 0) /* for example, a FUSE file system whose daemon has ended */
        return confine_report(c, CONFINE_ABSENT, "absent", "%s", strerror(errno));
    if (strcmp(path, "/") == 0 || is_of_the_kernel(&fs))
        return confine_report(c, CONFINE_REFUSED, "refused", "%s", path);
    for (size_t i = 0; i < c->refused_count; i++)
        if (lies_in(path, c->refused[i]) || lies_in(c->refused[i], path))
            return confine_report(c, CONFINE_REFUSED, "refused", "%s", path);
    return 0;
}
