/* SPDX-License-Identifier: Apache-2.0 */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int write_all(int fd, const void *data, size_t len)
{
    const char *next = data;
    while (len > 0) {
        ssize_t n = write(fd, next, len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        next += n;
        len -= (size_t)n;
    }
    return 0;
}

int write_file(const char *path, mode_t mode, const char *content)
{
    return write_file_data(path, mode, content, strlen(content));
}

int write_file_data(const char *path, mode_t mode, const void *data, size_t len)
{
    (void)unlink(path); /* it may be a link to a read-only place */
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
    if (fd < 0)
        return -errno;
    int rc = write_all(fd, data, len);
    if (fchmod(fd, mode) < 0 && rc == 0)
        rc = -errno;
    (void)close(fd);
    return rc;
}

int replace_file(const char *path, mode_t mode, const void *data, size_t len)
{
    char made[PATH_MAX];
    int n = snprintf(made, sizeof made, "%s.new", path);
    if (n < 0 || (size_t)n >= sizeof made)
        return -ENAMETOOLONG;
    int rc = write_file_data(made, mode, data, len);
    if (rc == 0 && rename(made, path) < 0)
        rc = -errno;
    if (rc < 0)
        (void)unlink(made);
    return rc;
}

int read_file(const char *path, size_t most, struct buf *out)
{
    enum { PART = 65536 };
    struct stat st;
    ssize_t n = 1;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int rc = fstat(fd, &st) < 0 ? -errno : S_ISREG(st.st_mode) ? 0 : -EINVAL;
    for (size_t got = 0; rc == 0 && n > 0; got += (size_t)n) {
        if (got > most || (rc = buf_reserve(out, PART)) < 0)
            break;
        n = read(fd, out->data + out->head + out->len, PART);
        rc = n < 0 ? -errno : 0;
        out->len += n > 0 ? (size_t)n : 0;
    }
    (void)close(fd);
    return rc == 0 && n > 0 ? -EFBIG : rc;
}

int write_existing(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int rc = write(fd, text, strlen(text)) < 0 ? -errno : 0;
    (void)close(fd);
    return rc;
}
