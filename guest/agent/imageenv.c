/* SPDX-License-Identifier: Apache-2.0 */
#include "imageenv.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MARK "VHPC_IMAGE_ENVIRONMENT="

/* Variables that say who and where the job is; an image cannot know them. */
static bool is_jobs(const char *name, size_t len)
{
    static const char *const names[] = {"HOME", "LOGNAME", "OLDPWD", "PWD", "USER"};
    static const char *const prefixes[] = {"PMI", "SLURM", "VHPC_"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i]) == len && strncmp(name, names[i], len) == 0)
            return true;
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (len >= strlen(prefixes[i]) && strncmp(name, prefixes[i], strlen(prefixes[i])) == 0)
            return true;
    return false;
}

/* The length of the name at the start of a line, 0 if the line is not NAME=VALUE. */
static size_t name_length(const char *line, size_t len)
{
    static const char first[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_";
    size_t n = 0;
    while (n < len && line[n] != '\0' &&
           (strchr(first, line[n]) != NULL || (n > 0 && line[n] >= '0' && line[n] <= '9')))
        n++;
    return n < len && line[n] == '=' && memchr(line, '\0', len) == NULL ? n : 0;
}

static int add(struct image_env *e, const char *line, size_t len)
{
    if (len == 0 || *line == '#')
        return 0;
    size_t name = name_length(line, len);
    if (name == 0 || e->count == IMAGE_ENV_ENTRIES_MAX)
        return -EINVAL;
    if (is_jobs(line, name))
        return 0;
    e->entries[e->count] = strndup(line, len);
    return e->entries[e->count++] == NULL ? -ENOMEM : 0;
}

/* FNV-1a: equal files have equal marks. */
static uint64_t hash(const char *data, size_t len)
{
    uint64_t value = 0xcbf29ce484222325U;
    for (size_t i = 0; i < len; i++)
        value = (value ^ (uint8_t)data[i]) * 0x100000001b3U;
    return value;
}

int image_env_parse(struct image_env *e, const char *data, size_t len)
{
    int rc = 0;
    *e = (struct image_env){.entries = calloc(IMAGE_ENV_ENTRIES_MAX, sizeof *e->entries)};
    if (e->entries == NULL)
        return -ENOMEM;
    for (size_t at = 0; at < len && rc == 0;) {
        const char *end = memchr(data + at, '\n', len - at);
        size_t length = end == NULL ? len - at : (size_t)(end - data) - at;
        rc = add(e, data + at, length);
        at += length + 1;
    }
    (void)snprintf(e->mark, sizeof e->mark, MARK "%016llx", (unsigned long long)hash(data, len));
    if (rc < 0)
        image_env_free(e);
    return rc;
}

static ssize_t read_whole(int fd, char *data, size_t size)
{
    size_t len = 0;
    while (len < size) {
        ssize_t n = read(fd, data + len, size - len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            break;
        len += (size_t)n;
    }
    return (ssize_t)len;
}

int image_env_load(struct image_env *e, const char *path)
{
    struct stat st;
    *e = (struct image_env){0};
    /* O_NONBLOCK: a pipe in an image must not stop its boot */
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT || errno == ENOTDIR ? 0 : -errno;
    int rc = fstat(fd, &st) < 0 ? -errno : 0;
    if (rc == 0 && (!S_ISREG(st.st_mode) || st.st_size > IMAGE_ENV_SIZE_MAX))
        rc = S_ISREG(st.st_mode) ? -EFBIG : -EINVAL;
    char *data = rc == 0 ? malloc(IMAGE_ENV_SIZE_MAX) : NULL;
    if (rc == 0) {
        ssize_t len = data == NULL ? -ENOMEM : read_whole(fd, data, IMAGE_ENV_SIZE_MAX);
        rc = len < 0 ? (int)len : image_env_parse(e, data, (size_t)len);
    }
    free(data);
    (void)close(fd);
    return rc;
}

int image_env_apply(const struct image_env *e, struct execspec *spec)
{
    size_t value = sizeof MARK - 1;
    char name[sizeof MARK];
    (void)snprintf(name, sizeof name, "%.*s", (int)value - 1, MARK);
    const char *now = execspec_getenv(spec, name);
    if (e->count == 0 || (now != NULL && strcmp(now, e->mark + value) == 0))
        return 0;
    int rc = 0;
    for (size_t i = 0; i < e->count && rc == 0; i++) {
        const char *entry = e->entries[i];
        size_t length = strcspn(entry, "=") + 1;
        char *prefix = strndup(entry, length);
        if (prefix == NULL)
            return -ENOMEM;
        execspec_drop_env(spec, prefix);
        free(prefix);
        rc = execspec_add_env(spec, entry);
    }
    execspec_drop_env(spec, MARK);
    return rc < 0 ? rc : execspec_add_env(spec, e->mark);
}

void image_env_free(struct image_env *e)
{
    for (size_t i = 0; i < e->count; i++)
        free(e->entries[i]);
    free(e->entries);
    *e = (struct image_env){0};
}
