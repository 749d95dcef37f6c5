/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A batch script, at the path that it has on the host: so the script sees the same $0 as outside of
 * a guest.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"
#include "directory.h"
#include "file.h"

/* mkdir -p of all directories above the last '/'. */
static int make_parents(const char *path)
{
    char above[PATH_MAX];
    if (path[0] != '/' || strlen(path) >= sizeof above || strstr(path, "/../") != NULL)
        return -EINVAL;
    (void)snprintf(above, sizeof above, "%.*s/", (int)(strrchr(path, '/') - path), path);
    return directory_make(above, 0755);
}

/* The spool directory may be shared with this guest; then the file exists already. */
static bool same_content(const struct execspec *spec)
{
    uint8_t part[4096];
    size_t at = 0;
    ssize_t n = -1;
    int fd = open(spec->script_path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return false;
    while ((n = read(fd, part, sizeof part)) > 0) {
        if ((size_t)n > spec->script_len - at || memcmp(part, spec->script + at, (size_t)n) != 0)
            break;
        at += (size_t)n;
    }
    (void)close(fd);
    return n == 0 && at == spec->script_len;
}

int script_write(const struct execspec *spec, bool *written)
{
    *written = false;
    if (spec->script_path == NULL)
        return 0;
    int rc = make_parents(spec->script_path);
    if (rc < 0)
        return rc;
    int fd = open(spec->script_path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0500);
    if (fd < 0)
        return errno == EEXIST && same_content(spec) ? 0 : -errno;
    rc = write_all(fd, spec->script, spec->script_len);
    if (rc == 0 && geteuid() == 0 && fchown(fd, spec->uid, spec->gid) < 0)
        rc = -errno;
    if (rc == 0 && fchmod(fd, 0500) < 0)
        rc = -errno;
    (void)close(fd);
    if (rc < 0)
        (void)unlink(spec->script_path);
    *written = rc == 0;
    return rc;
}

void script_remove(const struct execspec *spec)
{
    (void)unlink(spec->script_path);
}
