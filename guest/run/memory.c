/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slurm reads only the cgroups of the node, where the guest's kernel has killed nothing: so this
 * process says that a program was killed for memory.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "run.h"

/* The option of sbatch that the job's memory comes from. */
static const char *option(void)
{
    if (getenv("SLURM_MEM_PER_CPU") != NULL)
        return "--mem-per-cpu";
    return getenv("SLURM_MEM_PER_GPU") != NULL ? "--mem-per-gpu" : "--mem";
}

void run_report_memory(const struct execspec *spec, const struct front_result *r)
{
    char host[256] = "this node", had[64] = "has no more";
    const char *job = getenv("SLURM_JOB_ID");
    const char *node = getenv("SLURMD_NODENAME");
    const char *step = spec->step != NULL ? spec->step : "(none)";
    if (r->oom_kills == 0)
        return;
    (void)gethostname(host, sizeof host - 1);
    job = job != NULL ? job : "(none)";
    if (r->had_kib > 0)
        (void)snprintf(had, sizeof had, "has %" PRIu64 " MiB for programs", r->had_kib / 1024);
    (void)fprintf(stderr,
                  "vhpc: step %s.%s: a program in the guest of %s was killed for memory "
                  "(memory.events oom_kill: %" PRIu64 "); the guest %s: ask for more with %s, see: "
                  "vhpc seff %s\n",
                  job, step, node != NULL ? node : host, r->oom_kills, had, option(), job);
}
