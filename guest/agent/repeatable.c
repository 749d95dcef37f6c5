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

/* Launchers of MPI name all nodes of the job. */
static bool is_whole_job(const char *nodelist)
{
    return is_variable("SLURM_JOB_NODELIST", nodelist) || is_variable("VHPC_NODELIST", nodelist);
}

void repeatable_see(struct repeatable *r, const char *name, const char *value)
{
    static const char *const never[] = {
        "async",    "bcast",       "container",  "container-id", "exclude",   "het-group", "jobid",
        "nodefile", "no-allocate", "pack-group", "pty",          "test-only", "wait",      NULL};
    /* Slurm gives an external launcher's step (that of mpirun) all that the job has. */
    static const char *const harmless[] = {"chdir",      "comment",     "cpu-bind",
                                           "error",      "export",      "external-launcher",
                                           "label",      "job-name",    "kill-on-bad-exit",
                                           "mpi",        "output",      "multi-prog",
                                           "quiet",      "open-mode",   "propagate",
                                           "time",       "verbose",     "task-epilog",
                                           "unbuffered", "task-prolog", NULL};
    if (slurm_name_is_one_of(name, never) || (strcmp(name, "open-mode") == 0 && value[0] != 'a'))
        r->never = true;
    else if (strcmp(name, "input") == 0)
        r->never = r->never || strcmp(value, "none") != 0;
    else if (strcmp(name, "nodelist") == 0) {
        r->never = r->never || r->nodelist != NULL || !is_whole_job(value);
        r->nodelist = value;
    } else if (strcmp(name, "nodes") == 0)
        r->nodes = value;
    else if (strcmp(name, "ntasks") == 0)
        r->tasks = value;
    else if (!slurm_name_is_one_of(name, harmless))
        r->chooses = true;
}

/* All tasks of the job, or one on each node: Slurm leaves no node of a step without a task. */
static bool fills_job(const struct repeatable *r, const char *nodes)
{
    bool all_nodes = r->nodes == NULL || strcmp(r->nodes, nodes) == 0;
    bool all_tasks = r->tasks == NULL || is_variable("SLURM_NTASKS", r->tasks);
    return all_nodes && (all_tasks || strcmp(r->tasks, nodes) == 0);
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
    return !r->chooses && nodes != NULL && fills_job(r, nodes) &&
           is_variable("SLURM_NNODES", nodes) &&
           (tasks == NULL || is_variable("SLURM_NPROCS", tasks));
}

int repeatable_nodelist(const struct repeatable *r, char *const *word)
{
    const char *value = r->nodelist;
    if (value == NULL)
        return 0;
    if (word[1] == value && (strcmp(word[0], "--nodelist") == 0 || strcmp(word[0], "-w") == 0))
        return 2;
    bool alone = word[0][0] == '-' && (word[0][1] == '-' || word[0][1] == 'w');
    return alone && value > word[0] && value <= word[0] + strlen(word[0]) ? 1 : 0;
}
