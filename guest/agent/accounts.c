/* SPDX-License-Identifier: Apache-2.0 */
#include "accounts.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool has_name(const char *line, const char *name)
{
    size_t len = strlen(name);
    return strncmp(line, name, len) == 0 && line[len] == ':';
}

static bool has_id(const char *line, uint32_t id)
{
    const char *p = strchr(line, ':');
    p = p != NULL ? strchr(p + 1, ':') : NULL;
    return p != NULL && strtoul(p + 1, NULL, 10) == id;
}

/* Copy the old entries and put the new one before those with the same id; 0 or -errno. */
static int merge(FILE *from, FILE *to, const char *name, uint32_t id, const char *line)
{
    char *old = NULL;
    size_t size = 0;
    bool put = false;
    while (from != NULL && getline(&old, &size, from) > 0) {
        if (has_name(old, name))
            continue;
        if (!put && has_id(old, id)) {
            (void)fprintf(to, "%s\n", line);
            put = true;
        }
        (void)fputs(old, to);
        if (strchr(old, '\n') == NULL)
            (void)fputc('\n', to);
    }
    free(old);
    if (!put)
        (void)fprintf(to, "%s\n", line);
    return ferror(to) ? -EIO : 0;
}

int accounts_put(const char *path, const char *name, uint32_t id, const char *line)
{
    char next[300];
    (void)snprintf(next, sizeof next, "%s.vhpc", path);
    FILE *from = fopen(path, "re");
    if (from == NULL && errno != ENOENT)
        return -errno;
    int fd = open(next, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    FILE *to = fd >= 0 ? fdopen(fd, "w") : NULL;
    int rc = to == NULL ? -errno : merge(from, to, name, id, line);
    if (to != NULL && fclose(to) != 0 && rc == 0)
        rc = -errno;
    if (from != NULL)
        (void)fclose(from);
    if (rc == 0 && (chmod(next, 0644) < 0 || rename(next, path) < 0))
        rc = -errno;
    if (rc < 0)
        (void)unlink(next);
    return rc;
}
