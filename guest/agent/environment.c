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

int environment_set(struct agent *a, const struct buf *list, const char *start_dir, char *text,
                    size_t size)
{
    static struct image_env without_image;
    if (a->has_user_env)
        return 0;
    if (a->image_env == NULL)
        a->image_env = &without_image;
    const size_t before = a->image_env->count;
    int rc = image_env_add_list(a->image_env, (const char *)buf_head(list), list->len);
    a->image_env->users = a->image_env->count - before;
    if (rc == 0 && start_dir != NULL && (a->start_dir = strdup(start_dir)) == NULL)
        rc = -ENOMEM;
    a->has_user_env = rc == 0;
    if (rc < 0)
        (void)snprintf(text, size, "cannot set the variables of the user: %s",
                       rc == -EINVAL ? "each must be NAME=VALUE" : strerror(-rc));
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
