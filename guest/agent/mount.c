/* SPDX-License-Identifier: Apache-2.0 */
/* The mount operation: mounts a folder of the host, by its virtiofs tag. */
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"
#include "mountpoint.h"

#define READ_AHEAD_KIB "1024"

/*
 * Finds the disk with the snapshot of a share by its serial number, which is the tag; device gets
 * its path. False: the share has no snapshot, and is a virtiofs.
 */
static bool disk_of(const char *tag, char *device, size_t size)
{
    glob_t found = {0};
    bool is_there = false;
    if (glob("/sys/block/vd*/serial", GLOB_NOSORT, NULL, &found) != 0)
        return false;
    for (size_t i = 0; i < found.gl_pathc && !is_there; i++) {
        char serial[64] = "";
        const char *name = found.gl_pathv[i] + strlen("/sys/block/");
        FILE *f = fopen(found.gl_pathv[i], "re");
        if (f == NULL)
            continue;
        if (fgets(serial, sizeof serial, f) != NULL)
            serial[strcspn(serial, "\n")] = '\0';
        (void)fclose(f);
        is_there = strcmp(serial, tag) == 0;
        if (is_there)
            (void)snprintf(device, size, "/dev/%.*s", (int)strcspn(name, "/"), name);
    }
    globfree(&found);
    return is_there;
}

static bool is_tag(const char *tag)
{
    /* 36 bytes is what the device's configuration space holds (VIRTIO 1.2, section 5.11.4). */
    return tag[0] != '\0' && strlen(tag) <= 36 &&
           strspn(tag, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") ==
               strlen(tag);
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
    if (!is_tag(tag) || !mountpoint_allowed(path)) {
        (void)snprintf(text, size,
                       "a share cannot be mounted on %.200s, a directory of the guest's own system",
                       path);
        return -EINVAL;
    }
    if (!a->system)
        return 0;
    char device[64];
    bool is_disk = disk_of(tag, device, sizeof device);
    const char *source = is_disk ? device : tag, *type = is_disk ? "erofs" : "virtiofs";
    unsigned long flags = MS_NOSUID | MS_NODEV | (read_only || is_disk ? MS_RDONLY : 0);
    if (mountpoint_has(path, type, source))
        return 0;
    int rc = mountpoint_make(path, real);
    if (rc == 0 && mount(source, real, type, flags, NULL) < 0)
        rc = -errno;
    if (rc < 0)
        (void)snprintf(text, size, "cannot mount share %s on %.200s: %s", tag, path, strerror(-rc));
    else if (!is_disk)
        set_read_ahead(real);
    return rc;
}
