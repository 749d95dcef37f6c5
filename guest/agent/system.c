/* SPDX-License-Identifier: Apache-2.0 */
/* PID 1 of a lean guest: the file systems that programs expect, and power-off. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"
#include "devnodes.h"
#include "directory.h"

struct mount_point {
    const char *type;
    const char *path;
    unsigned long flags;
    const char *data;
    mode_t mode;
};

static char terminals[64];

static const struct mount_point points[] = {
    {"proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL, 0555},
    {"sysfs", "/sys", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL, 0555},
    {"devtmpfs", "/dev", MS_NOSUID, "mode=0755", 0755},
    {"devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, terminals, 0755},
    {"tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, "mode=1777,size=50%", 01777},
    {"tmpfs", "/run", MS_NOSUID | MS_NODEV, "mode=0755,size=10%", 0755},
    {"cgroup2", "/sys/fs/cgroup", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL, 0555},
};

/* A mount point lies on another device than the directory above it. */
static bool is_mounted(const char *path)
{
    char parent[256];
    struct stat here, above;
    (void)snprintf(parent, sizeof parent, "%s/..", path);
    return lstat(path, &here) == 0 && lstat(parent, &above) == 0 && here.st_dev != above.st_dev;
}

static void link_dev(const char *target, const char *path)
{
    if (symlink(target, path) < 0 && errno != EEXIST)
        (void)fprintf(stderr, "vhpc-agent: %s: %s\n", path, strerror(errno));
}

/* A tmpfs on /tmp, only if the image's own /tmp is not writable. */
static void check_tmp(void)
{
    (void)directory_make("/tmp", 0755);
    if (access("/tmp", W_OK) == 0) {
        (void)chmod("/tmp", 01777);
        return;
    }
    if (mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777") < 0)
        (void)fprintf(stderr, "vhpc-agent: /tmp: %s\n", strerror(errno));
}

void system_open_root(void)
{
    struct statvfs root;
    if (statvfs("/", &root) == 0 && (root.f_flag & ST_RDONLY) != 0 &&
        mount(NULL, "/", NULL, MS_REMOUNT, NULL) < 0)
        (void)fprintf(stderr, "vhpc-agent: / is read-only: %s\n", strerror(errno));
}

void system_mount_all(void)
{
    (void)umask(022);
    (void)snprintf(terminals, sizeof terminals, "gid=%u,mode=620,ptmxmode=666",
                   devnodes_terminal_group("/etc/group"));
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        const struct mount_point *p = &points[i];
        if (is_mounted(p->path))
            continue;
        (void)mkdir(p->path, p->mode);
        if (mount(p->type, p->path, p->type, p->flags, p->data) < 0)
            (void)fprintf(stderr, "vhpc-agent: cannot mount %s: %s\n", p->path, strerror(errno));
    }
    /* As with systemd: container engines expect that mounts reach their own namespaces. */
    if (mount(NULL, "/", NULL, MS_REC | MS_SHARED, NULL) < 0)
        (void)fprintf(stderr, "vhpc-agent: cannot share mounts: %s\n", strerror(errno));
    link_dev("/proc/self/fd", "/dev/fd");
    link_dev("/proc/self/fd/0", "/dev/stdin");
    link_dev("/proc/self/fd/1", "/dev/stdout");
    link_dev("/proc/self/fd/2", "/dev/stderr");
    check_tmp();
}

bool system_parameter(const char *word, char *path, size_t size)
{
    char line[4096]; /* COMMAND_LINE_SIZE of x86 is 2048 */
    const size_t length = strlen(word);
    int fd = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, line, sizeof line - 1);
    if (fd >= 0)
        (void)close(fd);
    line[n > 0 ? n : 0] = '\0';
    for (char *rest = line, *p; (p = strsep(&rest, " \t\n")) != NULL;) {
        if (strncmp(p, word, length) != 0 || p[length] != '/' || strlen(p + length) >= size)
            continue;
        memcpy(path, p + length, strlen(p + length) + 1);
        return true;
    }
    return false;
}

/*
 * A program that wants more memory than the guest has makes the kernel drop the programs' own pages
 * and read them again for minutes, before it kills anything. With this the kernel kills as soon as
 * it cannot keep what was used within the last second (admin-guide/mm/multigen_lru.rst, "Thrashing
 * prevention"). A value that the image has set stays.
 */
void system_prevent_thrashing(void)
{
    static const char path[] = "/sys/kernel/mm/lru_gen/min_ttl_ms", ms[] = "1000";
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return; /* a kernel without CONFIG_LRU_GEN */
    char now[16] = "";
    if (read(fd, now, sizeof now - 1) > 0 && strcmp(now, "0\n") == 0)
        (void)!pwrite(fd, ms, sizeof ms - 1, 0);
    (void)close(fd);
}

/*
 * Numbers of files and processes for which the kernel's default is less than what systemd sets on
 * nodes: programs then have all of the limits that come with their EXEC. A larger number stays.
 */
void system_raise_numbers(void)
{
    static const struct {
        const char *path;
        long long least;
    } numbers[] = {{"/proc/sys/fs/nr_open", 1073741816},
                   {"/proc/sys/fs/file-max", LLONG_MAX},
                   {"/proc/sys/kernel/pid_max", 4194304}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        char text[32] = "";
        int fd = open(numbers[i].path, O_RDWR | O_CLOEXEC);
        if (fd < 0)
            continue;
        if (read(fd, text, sizeof text - 1) > 0 && strtoll(text, NULL, 10) < numbers[i].least) {
            int n = snprintf(text, sizeof text, "%lld", numbers[i].least);
            (void)!pwrite(fd, text, (size_t)n, 0);
        }
        (void)close(fd);
    }
}

_Noreturn void system_poweroff(void)
{
    sync();
    (void)reboot((int)RB_POWER_OFF);
    /* This kernel has no power management: the host destroys a halted guest. */
    (void)reboot((int)RB_HALT_SYSTEM);
    for (;;) {
        (void)waitpid(-1, NULL, 0);
        (void)sleep(1);
    }
}
