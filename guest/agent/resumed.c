/* SPDX-License-Identifier: Apache-2.0 */
#include "resumed.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "file.h"

extern char **environ;

static bool is_of_job(const char *variable)
{
    return strncmp(variable, "SLURM", 5) == 0 || strncmp(variable, "VHPC_", 5) == 0;
}

/* "NAME=VALUE" of the same name; NULL: there is none. */
static const char *same_name(const struct execspec *s, const char *variable)
{
    size_t len = strcspn(variable, "=") + 1;
    for (size_t i = 0; i < s->envc; i++)
        if (strncmp(s->envp[i], variable, len) == 0)
            return s->envp[i];
    return NULL;
}

/* The same of a run. Slurm does not count the first one, and vhpc's plugin reads the count. */
static const char *in_run(const struct execspec *run, const char *variable)
{
    static const char none[] = "SLURM_RESTART_COUNT=0";
    const char *found = same_name(run, variable);
    bool count = strncmp(variable, none, sizeof none - 2) == 0;
    return found == NULL && count ? none : found;
}

int resumed_write(const char *path, const struct execspec *first, const struct execspec *now)
{
    struct buf b = {0};
    int rc = 0;
    for (size_t i = 0; i < first->envc && rc == 0; i++) {
        const char *old = first->envp[i];
        const char *new = is_of_job(old) ? in_run(now, old) : NULL;
        if (new == NULL || strcmp(old, new) == 0)
            continue;
        rc = buf_append(&b, old, strlen(old) + 1);
        rc = rc < 0 ? rc : buf_append(&b, new, strlen(new) + 1);
    }
    if (rc == 0 && b.len > 0)
        rc = write_file_data(path, 0644, buf_head(&b), b.len);
    else if (rc == 0 && unlink(path) < 0 && errno != ENOENT)
        rc = -errno;
    buf_free(&b);
    return rc;
}

int resumed_replace(struct execspec *spec, const struct execspec *before,
                    const struct execspec *now)
{
    for (size_t i = 0; i < spec->envc; i++) {
        const char *had = is_of_job(spec->envp[i]) ? in_run(before, spec->envp[i]) : NULL;
        const char *new =
            had != NULL &&strcmp(had, spec->envp[i]) == 0 ? in_run(now, spec->envp[i]) : NULL;
        char *copy = new != NULL ? strdup(new) : NULL;
        if (new != NULL && copy == NULL)
            return -ENOMEM;
        if (copy == NULL)
            continue;
        free(spec->envp[i]);
        spec->envp[i] = copy;
    }
    return 0;
}

static void replace(const char *old, const char *new)
{
    for (char **e = environ; e != NULL && *e != NULL; e++) {
        char *name;
        if (strcmp(*e, old) != 0)
            continue;
        name = strndup(new, strcspn(new, "="));
        if (name != NULL)
            (void)setenv(name, new + strcspn(new, "=") + 1, 1);
        free(name);
        return;
    }
}

void resumed_apply(const char *path)
{
    char *old = NULL, *new = NULL;
    size_t old_room = 0, new_room = 0;
    FILE *f = fopen(path, "re");
    while (f != NULL && getdelim(&old, &old_room, '\0', f) > 0 &&
           getdelim(&new, &new_room, '\0', f) > 0)
        replace(old, new);
    free(old);
    free(new);
    if (f != NULL)
        (void)fclose(f);
}
