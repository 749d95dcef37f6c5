/* SPDX-License-Identifier: Apache-2.0 */
#include "scriptfile.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "buf.h"

enum { SCRIPT_MAX = VHPC_MESSAGE_MAX / 2 }; /* 4 MiB, as in Slurm */

static bool is_file(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && !S_ISDIR(st.st_mode);
}

static char *join(const char *folder, size_t len, const char *name)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%.*s%s%s", (int)len, folder, len > 0 ? "/" : "", name);
    return n > 0 && (size_t)n < sizeof path && is_file(path) ? strdup(path) : NULL;
}

char *scriptfile_find(const char *word, const char *folder)
{
    const char *path = getenv("PATH");
    char *found;
    if (word[0] == '.' || word[0] == '/')
        return is_file(word) ? strdup(word) : NULL;
    if (folder == NULL)
        folder = ".";
    found = folder[0] != '\0' ? join(folder, strlen(folder), word) : NULL;
    while (found == NULL && path != NULL && *path != '\0') {
        size_t len = strcspn(path, ":");
        found = len > 0 && len < PATH_MAX ? join(path, len, word) : NULL;
        path += len + (path[len] == ':' ? 1 : 0);
    }
    return found;
}

int scriptfile_read(const char *path, struct execspec *spec, char *why, size_t size)
{
    struct buf data = {0};
    uint8_t part[16384];
    ssize_t n = -1;
    int rc = 0, fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        rc = -errno;
    while (rc == 0 && (n = read(fd, part, sizeof part)) != 0) {
        if (n < 0 && errno != EINTR)
            rc = -errno;
        else if (n > 0 && data.len + (size_t)n > SCRIPT_MAX)
            rc = -EFBIG;
        else if (n > 0)
            rc = buf_append(&data, part, (size_t)n);
    }
    if (fd >= 0)
        (void)close(fd);
    if (rc == 0 && (spec->script = malloc(data.len + 1)) == NULL)
        rc = -ENOMEM;
    if (rc == 0) {
        if (data.len > 0)
            memcpy(spec->script, buf_head(&data), data.len);
        spec->script_len = data.len;
    }
    buf_free(&data);
    if (rc < 0)
        (void)snprintf(why, size, "%s",
                       rc == -EFBIG ? "the script is larger than 4 MiB" : strerror(-rc));
    return rc < 0 ? -1 : 0;
}
