/* SPDX-License-Identifier: Apache-2.0 */
#include "defaults.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "buf.h"

/* The value that a mark has for a name, and its length; NULL if it has none. */
static const char *marked(const char *mark, const char *name, size_t *len)
{
    size_t name_len = strlen(name);
    for (const char *p = mark; p != NULL && *p != '\0'; p += strspn(p, " ")) {
        size_t word = strcspn(p, " ");
        if (word > name_len && strncmp(p, name, name_len) == 0 && p[name_len] == '=') {
            *len = word - name_len - 1;
            return p + name_len + 1;
        }
        p += word;
    }
    return NULL;
}

static int set_env(struct execspec *spec, const char *name, const char *value)
{
    size_t size = strlen(name) + strlen(value) + 2;
    char *entry = malloc(size);
    if (entry == NULL)
        return -ENOMEM;
    (void)snprintf(entry, size, "%s=", name);
    execspec_drop_env(spec, entry);
    (void)snprintf(entry, size, "%s=%s", name, value);
    int rc = execspec_add_env(spec, entry);
    free(entry);
    return rc;
}

/*
 * Whether a variable is the user's: its value differs from what an agent set, or the user removed
 * it.
 */
static bool is_users(const struct execspec *spec, const char *mark, const char *name)
{
    size_t len = 0;
    const char *now = execspec_getenv(spec, name), *was = marked(mark, name, &len);
    if (now == NULL || was == NULL)
        return now != was;
    return strlen(now) != len || strncmp(now, was, len) != 0;
}

static int put_word(struct buf *b, const char *name, const char *value)
{
    int rc = b->len == 0 ? 0 : buf_append(b, " ", 1);
    rc = rc < 0 ? rc : buf_append(b, name, strlen(name));
    rc = rc < 0 ? rc : buf_append(b, "=", 1);
    return rc < 0 ? rc : buf_append(b, value, strlen(value));
}

int defaults_apply(struct execspec *spec, const char *mark, const struct default_value *list,
                   size_t count)
{
    const char *old = execspec_getenv(spec, mark);
    struct buf b = {0};
    int rc = 0;
    char *was = strdup(old != NULL ? old : "");
    if (was == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < count && rc == 0; i++) {
        const char *name = list[i].name, *value = list[i].value;
        bool users = !list[i].always && is_users(spec, was, name);
        if (value == NULL)
            continue;
        if (!users)
            rc = set_env(spec, name, value);
        /* A removed variable stays in the mark, so that steps of this step do not set it again. */
        if (rc == 0 && (!users || execspec_getenv(spec, name) == NULL))
            rc = put_word(&b, name, value);
    }
    rc = rc < 0 ? rc : buf_append(&b, "", 1);
    rc = rc < 0 ? rc : set_env(spec, mark, (const char *)buf_head(&b));
    buf_free(&b);
    free(was);
    return rc;
}
