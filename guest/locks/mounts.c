/* SPDX-License-Identifier: Apache-2.0 */
#include "mounts.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>

#include "readtext.h"

/* The kernel writes space, tab, newline and backslash as three octal digits behind a backslash. */
static char *unescaped(const char *word)
{
    char *text = strdup(word), *to = text;
    for (const char *p = word; text != NULL; p++) {
        if (p[0] == '\\' && p[1] >= '0' && p[1] <= '3' && p[2] >= '0' && p[2] <= '7' &&
            p[3] >= '0' && p[3] <= '7') {
            *to++ = (char)((p[1] - '0') << 6 | (p[2] - '0') << 3 | (p[3] - '0'));
            p += 3;
            continue;
        }
        *to++ = *p;
        if (*p == '\0')
            break;
    }
    return text;
}

/* "36 35 0:45 / /home/alice rw,nosuid shared:1 - virtiofs home0 rw" */
static bool parse(char *line, struct mount_entry *e)
{
    char *rest = line;
    const char *word[5];
    uint64_t id, parent, major, minor;
    for (size_t i = 0; i < 5; i++)
        if ((word[i] = strsep(&rest, " ")) == NULL)
            return false;
    char *type = rest != NULL ? strstr(rest, " - ") : NULL;
    if (type == NULL || !text_is_number(word[0], 10, INT_MAX, &id) ||
        !text_is_number(word[1], 10, INT_MAX, &parent) || !text_number(&word[2], 10, ':', &major) ||
        !text_is_number(word[2], 10, UINT32_MAX, &minor))
        return false;
    type += 3;
    char *source = strchr(type, ' ');
    if (source == NULL)
        return false;
    *source++ = '\0';
    source[strcspn(source, " \n")] = '\0';
    *e = (struct mount_entry){.id = (int)id,
                              .parent = (int)parent,
                              .device = makedev((unsigned)major, (unsigned)minor),
                              .virtiofs = strcmp(type, "virtiofs") == 0,
                              .root = unescaped(word[3]),
                              .point = unescaped(word[4]),
                              .source = unescaped(source)};
    return true;
}

int mounts_read(struct mounts *m, const char *file)
{
    FILE *f = fopen(file, "re");
    char *line = NULL;
    size_t size = 0, cap = 0;
    int rc = 0;
    *m = (struct mounts){0};
    if (f == NULL)
        return -errno;
    while (rc == 0 && getline(&line, &size, f) > 0) {
        if (m->count == cap) {
            cap = cap == 0 ? 64 : cap * 2;
            struct mount_entry *entry = reallocarray(m->entry, cap, sizeof *entry);
            if (entry == NULL) {
                rc = -ENOMEM;
                break;
            }
            m->entry = entry;
        }
        struct mount_entry *e = &m->entry[m->count];
        if (!parse(line, e))
            continue;
        m->count++; /* mounts_free frees it */
        if (e->root == NULL || e->point == NULL || e->source == NULL)
            rc = -ENOMEM;
    }
    free(line);
    (void)fclose(f);
    if (rc < 0)
        mounts_free(m);
    return rc;
}

void mounts_free(struct mounts *m)
{
    for (size_t i = 0; i < m->count; i++) {
        free(m->entry[i].root);
        free(m->entry[i].point);
        free(m->entry[i].source);
    }
    free(m->entry);
    *m = (struct mounts){0};
}

static const struct mount_entry *find(const struct mounts *m, int id)
{
    for (size_t i = 0; i < m->count; i++)
        if (m->entry[i].id == id)
            return &m->entry[i];
    return NULL;
}

/* The part of the path behind the folder; NULL if the path is not in the folder. */
static const char *below(const char *path, const char *folder)
{
    size_t len = strlen(folder);
    if (len > 0 && folder[len - 1] == '/')
        len--; /* the root */
    if (strncmp(path, folder, len) != 0 || (path[len] != '/' && path[len] != '\0'))
        return NULL;
    return path + len;
}

/* The mount of the share; one inside of it was made by the kernel, and has no source. */
static const struct mount_entry *of_share(const struct mounts *m, const struct mount_entry *e)
{
    for (size_t left = m->count; e != NULL && e->virtiofs; left--) {
        if (strcmp(e->source, "none") != 0)
            return e;
        e = left > 0 ? find(m, e->parent) : NULL; /* the root of a namespace is its own parent */
    }
    return NULL;
}

const char *mounts_tag(const struct mounts *m, dev_t device)
{
    for (size_t i = 0; i < m->count; i++)
        if (m->entry[i].device == device && m->entry[i].virtiofs) {
            const struct mount_entry *e = of_share(m, &m->entry[i]);
            return e != NULL ? e->source : NULL;
        }
    return NULL;
}

int mounts_locate(const struct mounts *m, int id, const char *path, char *out, size_t size)
{
    const struct mount_entry *e = of_share(m, find(m, id));
    const char *rest = e != NULL ? below(path, e->point) : NULL;
    if (rest == NULL)
        return -ENOENT;
    const char *root = e->root + strspn(e->root, "/");
    rest += strspn(rest, "/");
    int n =
        snprintf(out, size, "%s%s%s", root, root[0] != '\0' && rest[0] != '\0' ? "/" : "", rest);
    if (n < 0 || (size_t)n >= size)
        return -ENOENT;
    if (n == 0)
        (void)snprintf(out, size, ".");
    return 0;
}
