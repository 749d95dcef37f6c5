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

#include "buf.h"
#include "slurm_args.h"

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

static int add(struct image_env *e, const char *entry, size_t name, size_t len)
{
    if (name == 0 || e->count == IMAGE_ENV_ENTRIES_MAX)
        return -EINVAL;
    if (is_jobs(entry, name))
        return 0;
    e->entries[e->count] = strndup(entry, len);
    return e->entries[e->count++] == NULL ? -ENOMEM : 0;
}

static int add_line(struct image_env *e, const char *line, size_t len)
{
    return len == 0 || *line == '#' ? 0 : add(e, line, name_length(line, len), len);
}

static int add_entry(struct image_env *e, const char *entry, size_t len)
{
    const char *equals = memchr(entry, '=', len);
    return add(e, entry, equals == NULL ? 0 : (size_t)(equals - entry), len);
}

/* FNV-1a: equal files have equal marks. */
static uint64_t hash(uint64_t value, const char *data, size_t len)
{
    for (size_t i = 0; i < len; i++)
        value = (value ^ (uint8_t)data[i]) * 0x100000001b3U;
    return value;
}

static int add_all(struct image_env *e, const char *data, size_t len, char end_mark,
                   int (*take)(struct image_env *, const char *, size_t))
{
    const size_t before = e->count;
    int rc = 0;
    if (e->entries == NULL)
        e->entries = calloc(IMAGE_ENV_ENTRIES_MAX, sizeof *e->entries);
    if (e->entries == NULL)
        return -ENOMEM;
    for (size_t at = 0; at < len && rc == 0;) {
        const char *end = memchr(data + at, end_mark, len - at);
        size_t length = end == NULL ? len - at : (size_t)(end - data) - at;
        rc = take(e, data + at, length);
        at += length + 1;
    }
    if (rc < 0) {
        while (e->count > before)
            free(e->entries[--e->count]);
        return rc;
    }
    e->hash = hash(e->hash == 0 ? 0xcbf29ce484222325U : e->hash, data, len);
    (void)snprintf(e->mark, sizeof e->mark, MARK "%016llx", (unsigned long long)e->hash);
    return 0;
}

int image_env_add_list(struct image_env *e, const char *data, size_t len)
{
    return add_all(e, data, len, '\0', add_entry);
}

int image_env_add_lines(struct image_env *e, const char *data, size_t len)
{
    return add_all(e, data, len, '\n', add_line);
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

int image_env_load(struct image_env *e, const char *path, image_env_add *content)
{
    struct stat st;
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
        rc = len < 0 ? (int)len : content(e, data, (size_t)len);
    }
    free(data);
    (void)close(fd);
    return rc;
}

void image_env_load_all(struct image_env *e)
{
    static const struct {
        const char *path;
        image_env_add *content;
        const char *rule;
    } files[] = {{IMAGE_ENV_LIST, image_env_add_list, "each entry must be NAME=VALUE"},
                 {IMAGE_ENV_LINES, image_env_add_lines, "each line must be NAME=VALUE"}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        int rc = image_env_load(e, files[i].path, files[i].content);
        if (rc < 0)
            (void)fprintf(stderr, "vhpc-agent: %s is not used: %s\n", files[i].path,
                          rc == -EINVAL ? files[i].rule : strerror(-rc));
    }
}

const char *image_env_get(const struct image_env *e, const char *name)
{
    size_t len = strlen(name);
    for (size_t i = e->count; i > 0; i--) /* the last one wins */
        if (strncmp(e->entries[i - 1], name, len) == 0 && e->entries[i - 1][len] == '=')
            return e->entries[i - 1] + len + 1;
    return NULL;
}

struct yielding {
    const struct image_env *e;
    struct execspec *spec;
};

static void yield_one(void *arg, const char *name, size_t len, bool has_value)
{
    const struct yielding *y = arg;
    char *prefix = has_value ? strndup(name, len + 1) : NULL;
    if (prefix == NULL)
        return;
    prefix[len] = '\0';
    const char *now = execspec_getenv(y->spec, prefix);
    const char *was = image_env_get(y->e, prefix);
    prefix[len] = '=';
    if (now != NULL && was != NULL && strcmp(now, was) == 0)
        execspec_drop_env(y->spec, prefix);
    free(prefix);
}

void image_env_yield(const struct image_env *e, const char *exported, struct execspec *spec)
{
    struct yielding y = {.e = e, .spec = spec};
    slurm_export_read(exported, yield_one, &y);
}

/* Whether a list NAME,NAME... has the name of an entry. */
static bool is_listed(const char *list, const char *entry)
{
    size_t len = strcspn(entry, "=");
    for (const char *p = list; p != NULL && *p != '\0'; p += strspn(p, ",")) {
        size_t word = strcspn(p, ",");
        if (word == len && strncmp(p, entry, len) == 0)
            return true;
        p += word;
    }
    return false;
}

static int apply(const struct image_env *e, const char *named, struct execspec *spec)
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
        if (i < e->count - e->users && is_listed(named, entry))
            continue;
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

/* The names that --export has, and those of the user's variables that this program has. */
static int put_users_names(const struct image_env *e, const struct execspec *spec, struct buf *b)
{
    const char *exported = execspec_getenv(spec, IMAGE_ENV_EXPORTED);
    int rc = exported == NULL ? 0 : buf_append(b, exported, strlen(exported));
    for (size_t i = 0; i < spec->envc && rc == 0 && e != NULL; i++)
        if (is_listed(e->kept, spec->envp[i])) {
            rc = buf_append(b, ",", 1);
            rc = rc < 0 ? rc : buf_append(b, spec->envp[i], strcspn(spec->envp[i], "="));
        }
    return rc < 0 ? rc : buf_append(b, "", 1);
}

int image_env_apply(const struct image_env *e, struct execspec *spec)
{
    struct buf users = {0};
    int rc = put_users_names(e, spec, &users);
    execspec_drop_env(spec, IMAGE_ENV_EXPORTED "=");
    if (rc == 0 && e != NULL)
        rc = apply(e, (const char *)buf_head(&users), spec);
    buf_free(&users);
    return rc;
}

void image_env_free(struct image_env *e)
{
    for (size_t i = 0; i < e->count; i++)
        free(e->entries[i]);
    free(e->entries);
    free(e->kept);
    *e = (struct image_env){0};
}
