/* SPDX-License-Identifier: Apache-2.0 */
#include "repeatable.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "slurm_args.h"

static bool is_variable(const char *name, const char *value)
{
    const char *text = getenv(name);
    return text != NULL && strcmp(text, value) == 0;
}

static size_t commas(const char *list, size_t len)
{
    size_t count = 0;
    for (size_t i = 0; i < len; i++)
        count += list[i] == ',';
    return count;
}

/* Launchers of MPI name all nodes of the job, or all but those before: how many are before? */
static bool ends_job(const char *nodelist, size_t *before)
{
    const char *all = getenv("VHPC_NODELIST");
    size_t len = strlen(nodelist), size = all != NULL ? strlen(all) : 0;
    *before = 0;
    if (is_variable("SLURM_JOB_NODELIST", nodelist))
        return true;
    if (len == 0 || len > size || strcmp(all + size - len, nodelist) != 0)
        return false;
    *before = commas(all, size - len);
    return len == size || all[size - len - 1] == ',';
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
        r->never = r->never || r->nodelist != NULL || !ends_job(value, &r->before);
        r->nodelist = value;
    } else if (strcmp(name, "nodes") == 0)
        r->nodes = value;
    else if (strcmp(name, "ntasks-per-node") == 0)
        *(strcmp(value, "1") == 0 ? &r->one_per_node : &r->chooses) = true;
    else if (strcmp(name, "ntasks") == 0)
        r->tasks = value;
    else if (!slurm_name_is_one_of(name, harmless))
        r->chooses = true;
}

static bool is_number(const char *text, size_t number)
{
    char digits[24];
    (void)snprintf(digits, sizeof digits, "%zu", number);
    return strcmp(text, digits) == 0;
}

/* All tasks of the job, or one on each node: Slurm leaves no node of a step without a task. */
static bool is_certain(const struct repeatable *r, size_t nodes)
{
    size_t left = nodes - r->before;
    bool whole = r->before == 0;
    bool one_each = r->tasks != NULL && is_number(r->tasks, left);
    bool all_tasks =
        whole && !r->one_per_node && (r->tasks == NULL || is_variable("SLURM_NTASKS", r->tasks));
    return r->before < nodes && (r->nodes != NULL ? is_number(r->nodes, left) : whole) &&
           (one_each || all_tasks);
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
    return !r->chooses && nodes != NULL && is_certain(r, strtoul(nodes, NULL, 10)) &&
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
