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

void run_report_memory(const struct execspec *spec, const struct front_result *r)
{
    char host[256] = "this node";
    const char *job = getenv("SLURM_JOB_ID");
    const char *node = getenv("SLURMD_NODENAME");
    const char *step = spec->step != NULL ? spec->step : "(none)";
    if (r->oom_kills == 0)
        return;
    (void)gethostname(host, sizeof host - 1);
    job = job != NULL ? job : "(none)";
    (void)fprintf(stderr,
                  "vhpc: step %s.%s: a program in the guest of %s was killed for memory "
                  "(memory.events oom_kill: %" PRIu64 "); the guest has no more: ask for more with "
                  "--mem, see: vhpc seff %s\n",
                  job, step, node != NULL ? node : host, r->oom_kills, job);
}
