/* SPDX-License-Identifier: Apache-2.0 */
/* The mount operation: mounts a folder of the host, by its virtiofs tag. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <mntent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"

#define READ_AHEAD_KIB "1024"

/* No share is mounted on these, nor below those in `trees`. */
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

static bool is_tag(const char *tag)
{
    /* 36 bytes is what the device's configuration space holds (VIRTIO 1.2, section 5.11.4). */
    return tag[0] != '\0' && strlen(tag) <= 36 &&
           strspn(tag, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") ==
               strlen(tag);
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

static int make_directories(const char *path)
{
    char part[PATH_MAX];
    for (size_t i = 1, len = strlen(path); i <= len; i++) {
        if (path[i] != '/' && path[i] != '\0')
            continue;
        memcpy(part, path, i);
        part[i] = '\0';
        if (mkdir(part, 0755) < 0 && errno != EEXIST)
            return -errno;
    }
    return 0;
}

static bool is_there(const char *tag, const char *path)
{
    bool found = false;
    FILE *f = setmntent("/proc/self/mounts", "re");
    if (f == NULL)
        return false;
    for (struct mntent *m; (m = getmntent(f)) != NULL;)
        if (strcmp(m->mnt_dir, path) == 0) /* the last entry is the uppermost mount */
            found = strcmp(m->mnt_type, "virtiofs") == 0 && strcmp(m->mnt_fsname, tag) == 0;
    (void)endmntent(f);
    return found;
}

/*
 * The kernel reads 128 KiB ahead, a request of virtiofs can carry 1 MiB (FUSE_MAX_MAX_PAGES), and
 * each costs a round trip to the host. A guest that does not let it be set only reads slower.
 *
 * mount(2) does not wait for the host's answer to FUSE_INIT, and this answer sets the value back.
 * So a child asks the host for something first, which the kernel sends after that answer; a host
 * that is slow, or never answers, does not hold up the agent.
 */
static void set_read_ahead(const char *mounted)
{
    if (fork() != 0)
        return;
    (void)close_range(STDERR_FILENO + 1, ~0U, 0);
    char path[64];
    struct statx st;
    if (statx(AT_FDCWD, mounted, AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &st) < 0)
        _exit(EXIT_FAILURE);
    (void)snprintf(path, sizeof path, "/sys/class/bdi/%u:%u/read_ahead_kb", st.stx_dev_major,
                   st.stx_dev_minor);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, READ_AHEAD_KIB, sizeof READ_AHEAD_KIB - 1) < 0)
        _exit(EXIT_FAILURE);
    _exit(EXIT_SUCCESS);
}

int mount_share(const struct agent *a, const char *tag, const char *path, bool read_only,
                char *text, size_t size)
{
    char real[PATH_MAX];
    if (!is_tag(tag) || !is_normal(path) || is_forbidden(path)) {
        (void)snprintf(text, size,
                       "a share cannot be mounted on %.200s, a directory of the guest's own system",
                       path);
        return -EINVAL;
    }
    if (!a->system || is_there(tag, path))
        return 0;
    int rc = make_directories(path);
    if (rc == 0 && realpath(path, real) == NULL)
        rc = -errno;
    if (rc == 0 && is_forbidden(real))
        rc = -EINVAL; /* a symbolic link in the image leads to a protected directory */
    if (rc == 0 &&
        mount(tag, real, "virtiofs", MS_NOSUID | MS_NODEV | (read_only ? MS_RDONLY : 0), NULL) < 0)
        rc = -errno;
    if (rc < 0)
        (void)snprintf(text, size, "cannot mount share %s on %.200s: %s", tag, path, strerror(-rc));
    else
        set_read_ahead(real);
    return rc;
}
