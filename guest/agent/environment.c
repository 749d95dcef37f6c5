/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The environment operation: variables of the user, which win over those of the image, and the
 * directory in which programs start.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent.h"
#include "imageenv.h"

/* The job whose start directory a program has had: its steps start where it is then. */
#define MARK "VHPC_START_DIRECTORY="

/* Sort a list NAME=VALUE or NAME, each with its NUL: values to be set, and names to be kept. */
static int sort_variables(const struct buf *list, struct buf *values, struct buf *kept)
{
    int rc = 0;
    for (size_t at = 0; at < list->len && rc == 0;) {
        const char *one = (const char *)buf_head(list) + at;
        struct buf *into = strchr(one, '=') != NULL ? values : kept;
        rc = buf_append(into, one, strlen(one));
        rc = rc < 0 ? rc : buf_append(into, into == values ? "" : ",", 1);
        at += strlen(one) + 1;
    }
    return rc < 0 ? rc : buf_append(kept, "", 1);
}

int environment_set(struct agent *a, const struct buf *list, const char *start_dir, char *text,
                    size_t size)
{
    struct buf values = {0}, kept = {0};
    if (a->has_user_env)
        return 0;
    const size_t before = a->image_env->count;
    int rc = sort_variables(list, &values, &kept);
    if (rc == 0 && kept.len > 1 &&
        (a->image_env->kept = strdup((const char *)buf_head(&kept))) == NULL)
        rc = -ENOMEM;
    rc =
        rc < 0 ? rc : image_env_add_list(a->image_env, (const char *)buf_head(&values), values.len);
    a->image_env->users = a->image_env->count - before;
    if (rc == 0 && start_dir != NULL && (a->start_dir = strdup(start_dir)) == NULL)
        rc = -ENOMEM;
    a->has_user_env = rc == 0;
    buf_free(&values);
    buf_free(&kept);
    if (rc < 0)
        (void)snprintf(text, size, "cannot set the variables of the user: %s",
                       rc == -EINVAL ? "each must be NAME=VALUE or NAME" : strerror(-rc));
    return rc;
}

int environment_start(struct session *s)
{
    struct execspec *spec = &s->spec;
    const char *job = execspec_getenv(spec, "SLURM_JOB_ID");
    const char *was = execspec_getenv(spec, "VHPC_START_DIRECTORY");
    char mark[64];
    if (s->agent->start_dir == NULL || (job != NULL && was != NULL && strcmp(job, was) == 0))
        return 0;
    (void)snprintf(mark, sizeof mark, MARK "%s", job != NULL ? job : "");
    free(spec->cwd);
    spec->cwd = strdup(s->agent->start_dir);
    s->starts_there = true;
    execspec_drop_env(spec, MARK);
    return spec->cwd == NULL ? -ENOMEM : execspec_add_env(spec, mark);
}
