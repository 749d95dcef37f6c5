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

/* The text of the third field; NULL if the line has none. */
static const char *third_field(const char *line)
{
    const char *p = strchr(line, ':');
    p = p != NULL ? strchr(p + 1, ':') : NULL;
    return p != NULL ? p + 1 : NULL;
}

static bool has_id(const char *line, uint32_t id)
{
    const char *p = third_field(line);
    return p != NULL && strtoul(p, NULL, 10) == id;
}

/* The first line of this name, to be freed; NULL if no line has it. */
static char *find(const char *path, const char *name)
{
    char *line = NULL;
    size_t size = 0;
    bool found = false;
    FILE *f = fopen(path, "re");
    while (f != NULL && !found && getline(&line, &size, f) > 0)
        found = has_name(line, name);
    if (f != NULL)
        (void)fclose(f);
    if (found)
        return line;
    free(line);
    return NULL;
}

bool accounts_has(const char *path, const char *name)
{
    char *line = find(path, name);
    const bool has = line != NULL;
    free(line);
    return has;
}

uint32_t accounts_number(const char *path, const char *name)
{
    char *line = find(path, name);
    const char *number = line != NULL ? third_field(line) : NULL;
    const uint32_t found = number != NULL ? (uint32_t)strtoul(number, NULL, 10) : 0;
    free(line);
    return found;
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
