/* SPDX-License-Identifier: Apache-2.0 */
/* The process as slurmstepd has set it up, described for the guest. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "run.h"

static int describe_groups(struct execspec *spec)
{
    int count = getgroups(0, NULL);
    if (count <= 0)
        return count < 0 ? -errno : 0;
    gid_t *groups = calloc((size_t)count, sizeof *groups);
    spec->groups = calloc((size_t)count, sizeof *spec->groups);
    if (groups == NULL || spec->groups == NULL) {
        free(groups);
        return -ENOMEM;
    }
    count = getgroups(count, groups);
    for (int i = 0; i < count; i++)
        spec->groups[i] = (uint32_t)groups[i];
    spec->group_count = count > 0 ? (size_t)count : 0;
    free(groups);
    return 0;
}

/* Read the spooled script here, as the user, who owns it; the guest cannot read it. */
static int carry_script(const char *path, struct execspec *spec)
{
    struct stat st;
    char *full = realpath(path, NULL);
    int rc = 0, fd = full != NULL ? open(full, O_RDONLY | O_CLOEXEC) : -1;
    free(full);
    if (fd < 0 || fstat(fd, &st) < 0)
        rc = -errno;
    else if (!S_ISREG(st.st_mode))
        rc = -EACCES;
    else if (st.st_size > VHPC_MESSAGE_MAX / 2)
        rc = -E2BIG;
    if (rc == 0 && (spec->script = malloc((size_t)st.st_size + 1)) == NULL)
        rc = -ENOMEM;
    while (rc == 0 && spec->script_len < (size_t)st.st_size) {
        ssize_t n =
            read(fd, spec->script + spec->script_len, (size_t)st.st_size - spec->script_len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            rc = -errno;
        if (n <= 0)
            break;
        spec->script_len += (size_t)n;
    }
    if (fd >= 0)
        (void)close(fd);
    if (rc == 0 && (spec->script_path = strdup(path)) == NULL)
        rc = -ENOMEM;
    return rc;
}

static int take_folder(struct execspec *spec)
{
    const char *folder = execspec_getenv(spec, VHPC_CWD_VARIABLE);
    if (folder == NULL)
        return 0;
    char *copy = strdup(folder);
    execspec_drop_env(spec, VHPC_CWD_VARIABLE "=");
    if (copy == NULL)
        return -ENOMEM;
    free(spec->cwd);
    spec->cwd = copy;
    return 0;
}

/*
 * The step; the agent sums the usage of programs by steps; the numbers of Slurm's own steps are in
 * slurm.h. It is the user's word: a false one is wrong only about the user's own job.
 */
static int name_step(const struct run_options *o, struct execspec *spec)
{
    const char *id = getenv("SLURM_STEP_ID");
    if (o->script)
        id = "batch";
    else if (id != NULL && strcmp(id, "4294967290") == 0)
        id = "interactive";
    else if (id == NULL || id[0] == '\0' || id[strspn(id, "0123456789")] != '\0')
        return 0;
    spec->step = strdup(id);
    return spec->step == NULL ? -ENOMEM : 0;
}

int run_describe(const struct run_options *o, struct execspec *spec)
{
    int rc = front_describe_self(spec);
    execspec_drop_env(spec, "VHPC_RUN_");
    run_bind(spec);
    if (rc == 0)
        rc = take_folder(spec);
    if (rc == 0)
        rc = name_step(o, spec);
    for (int i = 0; i < o->argc && rc == 0; i++)
        rc = execspec_add_arg(spec, o->argv[i]);
    if (rc == 0)
        rc = describe_groups(spec);
    if (rc == 0 && o->attach != NULL && (spec->attach = strdup(o->attach)) == NULL)
        rc = -ENOMEM;
    if (rc < 0)
        return rc;
    if (!o->script || o->attach != NULL)
        return 0;
    rc = carry_script(o->argv[0], spec);
    if (rc < 0)
        (void)fprintf(stderr, "vhpc-run: cannot read the script %s: %s\n", o->argv[0],
                      strerror(-rc));
    return rc;
}
