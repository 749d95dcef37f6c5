/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A minimal root directory: the system's programs, a /proc that shows only this process, and the
 * shared directory.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/mount.h>
#include <mntent.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "confine.h"

/* A directory that root owns and that each system has. In this namespace the new root hides it. */
#define PLACE "/run"
#define SHARE "/share"

static int failed(const struct confine *c, const char *what, const char *path)
{
    return confine_report(c, CONFINE_FAILED, "failed", "cannot %s %s: %s", what, path,
                          strerror(errno));
}

/* Sets the flags of a whole tree of mounts; mount_setattr(2), Linux 5.12. */
static int set_flags(const char *path, uint64_t flags)
{
    struct mount_attr attributes = {.attr_set = flags};

    return (int)syscall(SYS_mount_setattr, AT_FDCWD, path, AT_RECURSIVE, &attributes,
                        sizeof attributes);
}

/* Mount `source` at PLACE followed by `name`, without devices and setuid files. */
static int bind_mount(const struct confine *c, const char *source, const char *name, bool read_only,
                      unsigned long more)
{
    char target[PATH_MAX];
    uint64_t flags = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (read_only ? MOUNT_ATTR_RDONLY : 0);

    (void)snprintf(target, sizeof target, PLACE "%s", name);
    if (mkdir(target, 0755) != 0 && errno != EEXIST)
        return failed(c, "create", target);
    if (mount(source, target, NULL, MS_BIND | more, NULL) != 0)
        return failed(c, "show", name);
    if (set_flags(target, flags) != 0)
        return failed(c, "protect", name);
    return 0;
}

/* A directory of the system: a bind mount if it is a directory, the same link if it is a link. */
static int mount_system(const struct confine *c, const char *name)
{
    char target[PATH_MAX];
    char link[PATH_MAX];
    struct stat about;

    if (lstat(name, &about) != 0)
        return errno == ENOENT ? 0 : failed(c, "inspect", name);
    if (!S_ISLNK(about.st_mode))
        return bind_mount(c, name, name, true, 0);
    ssize_t length = readlink(name, link, sizeof link - 1);
    if (length < 0)
        return failed(c, "read", name);
    link[length] = '\0';
    (void)snprintf(target, sizeof target, PLACE "%s", name);
    return symlink(link, target) == 0 || errno == EEXIST ? 0 : failed(c, "create", target);
}

static const char *const system_directories[] = {"/usr", "/bin",   "/sbin",
                                                 "/lib", "/lib32", "/lib64"};
enum { SYSTEM_DIRECTORIES = sizeof system_directories / sizeof system_directories[0] };

/* The first directory of the command's path: "/opt" of /opt/virtiofsd/bin/virtiofsd. */
static int mount_command(const struct confine *c)
{
    char top[PATH_MAX];
    size_t length = 1 + strcspn(c->command[0] + 1, "/");

    if (length >= sizeof top)
        return confine_report(c, CONFINE_FAILED, "failed", "%s: %s", c->command[0],
                              strerror(ENAMETOOLONG));
    memcpy(top, c->command[0], length);
    top[length] = '\0';
    for (size_t i = 0; i < SYSTEM_DIRECTORIES; i++)
        if (strcmp(top, system_directories[i]) == 0)
            return 0;
    return mount_system(c, top);
}

/* Directories in which the dynamic loader searches for libraries. */
static int mount_loader_cache(const struct confine *c)
{
    static const char name[] = "/etc/ld.so.cache";

    if (access(name, F_OK) != 0)
        return 0;
    if (mkdir(PLACE "/etc", 0755) != 0)
        return failed(c, "create", PLACE "/etc");
    int fd = open(PLACE "/etc/ld.so.cache", O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0)
        return failed(c, "create", name);
    (void)close(fd);
    if (mount(name, PLACE "/etc/ld.so.cache", NULL, MS_BIND, NULL) != 0)
        return failed(c, "show", name);
    return set_flags(PLACE "/etc/ld.so.cache",
                     MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV) == 0
               ? 0
               : failed(c, "protect", name);
}

/*
 * A reader sees the processes that it may trace: in a user namespace of its own, this is only
 * itself (proc(5), hidepid; since Linux 5.8 the option applies to this mount only and has this
 * value). virtiofsd needs /proc/self/fd, and /proc/sys/fs/nr_open at its start.
 */
static int mount_proc(const struct confine *c)
{
    unsigned long flags = MS_NOSUID | MS_NODEV | MS_NOEXEC;

    if (mkdir(PLACE "/proc", 0755) != 0)
        return failed(c, "create", PLACE "/proc");
    return mount("proc", PLACE "/proc", "proc", flags, "hidepid=ptraceable") == 0
               ? 0
               : failed(c, "mount", "/proc with hidepid=ptraceable (Linux 5.8)");
}

static bool gives_access_to_the_kernel(const char *type)
{
    static const char *const types[] = {
        "proc",        "sysfs",    "cgroup",  "cgroup2", "debugfs",   "tracefs",    "securityfs",
        "devpts",      "devtmpfs", "bpf",     "pstore",  "efivarfs",  "selinuxfs",  "smackfs",
        "binfmt_misc", "configfs", "fusectl", "mqueue",  "hugetlbfs", "rpc_pipefs",
    };

    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (strcmp(type, types[i]) == 0)
            return true;
    return false;
}

/*
 * Unmount what is mounted below the shared directory and gives access to processes or the kernel,
 * such as the /proc of a chroot.  The user controls the paths below it, so they are followed with
 * the user's rights.
 */
static int unmount_kernel_filesystems(const struct confine *c)
{
    static char paths[64][PATH_MAX];
    size_t count = 0;
    FILE *mounts = setmntent("/proc/self/mounts", "re");
    static const char below[] = PLACE SHARE "/";

    if (mounts == NULL)
        return failed(c, "read", "/proc/self/mounts");
    for (struct mntent *m; (m = getmntent(mounts)) != NULL;) {
        if (strncmp(m->mnt_dir, below, sizeof below - 1) != 0 ||
            !gives_access_to_the_kernel(m->mnt_type))
            continue;
        if (count == sizeof paths / sizeof paths[0] || strlen(m->mnt_dir) >= sizeof paths[0]) {
            (void)endmntent(mounts);
            return confine_report(c, CONFINE_REFUSED, "refused", "%s: %s is mounted below it",
                                  c->share, m->mnt_type);
        }
        (void)snprintf(paths[count++], sizeof paths[0], "%s", m->mnt_dir);
    }
    (void)endmntent(mounts);
    confine_as_user(c);
    int error = 0;
    while (count > 0 && error == 0) /* the last entry is the uppermost mount */
        if (umount2(paths[--count], MNT_DETACH | UMOUNT_NOFOLLOW) != 0)
            error = errno;
    confine_as_root();
    if (error != 0)
        return confine_report(c, CONFINE_REFUSED, "refused", "%s: cannot unmount %s: %s", c->share,
                              paths[count] + sizeof(PLACE) - 1, strerror(error));
    return 0;
}

static int mount_share(const struct confine *c)
{
    char link[64];
    int code = 0;
    int share = confine_open_share(c, &code);

    if (share < 0)
        return code;
    code = confine_check_share(c, share, false);
    if (code == 0) {
        (void)snprintf(link, sizeof link, "/proc/self/fd/%d", share);
        code = bind_mount(c, link, SHARE, c->read_only, MS_REC);
    }
    (void)close(share);
    return code == 0 ? unmount_kernel_filesystems(c) : code;
}

static int make_root(const struct confine *c)
{
    int code = 0;

    for (size_t i = 0; code == 0 && i < SYSTEM_DIRECTORIES; i++)
        code = mount_system(c, system_directories[i]);
    if (code == 0)
        code = mount_command(c);
    if (code == 0)
        code = mount_loader_cache(c);
    if (code == 0)
        code = mount_proc(c);
    return code;
}

static int enter(const struct confine *c)
{
    if (chdir(PLACE) != 0 || syscall(SYS_pivot_root, ".", ".") != 0)
        return failed(c, "enter", "the new root");
    /* the old root is now mounted on the new one: pivot_root(2), NOTES */
    if (umount2(".", MNT_DETACH) != 0 || chdir("/") != 0)
        return failed(c, "leave", "the old root");
    return 0;
}

int confine_enter_root(const struct confine *c)
{
    int code = 0;
    int share = confine_open_share(c, &code); /* in the host's namespace, where autofs mounts */

    if (share < 0)
        return code;
    code = confine_check_share(c, share, true);
    (void)close(share);
    if (code != 0)
        return code;
    /* slave: mounts of the host below the shared directory appear here, and nothing goes back */
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) != 0)
        return failed(c, "create", "a mount namespace");
    if (mount("tmpfs", PLACE, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=64k") != 0)
        return failed(c, "mount a tmpfs on", PLACE);
    code = make_root(c);
    if (code == 0)
        code = mount_share(c);
    if (code == 0 && mount(NULL, PLACE, NULL,
                           MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL) != 0)
        code = failed(c, "protect", PLACE);
    return code == 0 ? enter(c) : code;
}
