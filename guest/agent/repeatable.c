/* SPDX-License-Identifier: Apache-2.0 */
#include "repeatable.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "slurm_args.h"

static bool is_variable(const char *name, const char *value)
{
    const char *text = getenv(name);
    return text != NULL && strcmp(text, value) == 0;
}

void repeatable_see(struct repeatable *r, const char *name, const char *value)
{
    static const char *const never[] = {
        "async", "bcast",     "container", "container-id", "exclude",  "external-launcher",
        "input", "jobid",     "het-group", "nodefile",     "nodelist", "no-allocate",
        "pty",   "test-only", "wait",      "pack-group",   NULL};
    static const char *const harmless[] = {
        "chdir",     "comment",    "cpu-bind",         "error",
        "export",    "job-name",   "kill-on-bad-exit", "label",
        "mpi",       "multi-prog", "open-mode",        "output",
        "propagate", "quiet",      "task-epilog",      "task-prolog",
        "time",      "unbuffered", "verbose",          NULL};
    if (slurm_name_is_one_of(name, never) || (strcmp(name, "open-mode") == 0 && value[0] != 'a'))
        r->never = true;
    else if (strcmp(name, "nodes") == 0)
        r->chooses = r->chooses || !is_variable("SLURM_JOB_NUM_NODES", value);
    else if (strcmp(name, "ntasks") == 0)
        r->chooses = r->chooses || !is_variable("SLURM_NTASKS", value);
    else if (!slurm_name_is_one_of(name, harmless))
        r->chooses = true;
}

bool repeatable_is(const struct repeatable *r)
{
    const char *guests = getenv("VHPC_JOB_GUESTS");
    const char *nodes = getenv("SLURM_JOB_NUM_NODES"), *tasks = getenv("SLURM_NTASKS");
    bool alone =
        nodes != NULL && strcmp(nodes, "1") == 0 && (guests == NULL || strcmp(guests, "1") == 0);
    if (r->never || getenv("SLURM_HOSTFILE") != NULL)
        return false;
    if (alone)
        return true;
    /* Users change the first of two variables, if any, to have other steps. */
    return !r->chooses && nodes != NULL && is_variable("SLURM_NNODES", nodes) &&
           (tasks == NULL || is_variable("SLURM_NPROCS", tasks));
}
