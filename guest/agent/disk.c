/* SPDX-License-Identifier: Apache-2.0 */
/* The disk operation: mounts the guest's own disk, an ext4 that its node has made, at a
 * directory. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"
#include "mountpoint.h"

/* Where all users of a system may write; in another place only the job's user may. */
static bool is_for_all(const char *path)
{
    return strcmp(path, "/tmp") == 0 || strcmp(path, "/var/tmp") == 0;
}

/* The directory is the root of the disk. */
static int give(const char *path, uint32_t uid, uint32_t gid)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int rc = 0;
    if (fchown(fd, is_for_all(path) ? 0 : uid, is_for_all(path) ? 0 : gid) < 0 ||
        fchmod(fd, is_for_all(path) ? 01777 : 0700) < 0)
        rc = -errno;
    /* of mkfs, for e2fsck, which is never run: the user finds an empty directory */
    (void)unlinkat(fd, "lost+found", AT_REMOVEDIR);
    (void)close(fd);
    return rc;
}

int mount_disk(const struct agent *a, const char *path, uint32_t uid, uint32_t gid, char *text,
               size_t size)
{
    char device[256];
    char real[PATH_MAX] = "";
    if (!mountpoint_allowed(path)) {
        (void)snprintf(text, size,
                       "a disk cannot be mounted on %.200s, a directory of the guest's own system",
                       path);
        return -EINVAL;
    }
    if (!a->system)
        return 0;
    if (!system_parameter("vhpc.agent.disk=", device, sizeof device)) {
        (void)snprintf(text, size, "this guest has no disk to mount on %.200s", path);
        return -ENODEV;
    }
    if (mountpoint_has(path, "ext4", device))
        return 0;
    int rc = mountpoint_make(path, real);
    if ((rc == 0 || rc == -EINVAL) && real[0] != '\0' && strcmp(real, path) != 0) {
        (void)snprintf(text, size, "links of the image lead from %.160s to %.160s: choose another",
                       path, real);
        return -ELOOP;
    }
    /* noinit_itable: the kernel must not fill the disk with tables that are not needed */
    if (rc == 0 && mount(device, path, "ext4", 0, "noinit_itable") < 0)
        rc = -errno;
    else if (rc == 0 && (rc = give(path, uid, gid)) < 0)
        (void)umount2(path, MNT_DETACH);
    if (rc < 0)
        (void)snprintf(text, size, "cannot mount the disk %s on %.200s: %s", device, path,
                       strerror(-rc));
    return rc;
}
