/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program on the node learns from write(2) that there is no room for its output. One in a guest
 * writes to a pipe, and does not: so this process says how much is missing.
 */
/* Decision: Output without room is discarded and the program continues */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "run.h"

static uint64_t dropped;
static int reason;

bool run_drop(struct exchange *x, size_t len, int error)
{
    (void)x;
    dropped += len;
    reason = error;
    return true;
}

void run_report_dropped(const struct execspec *spec)
{
    const char *job = getenv("SLURM_JOB_ID");
    const char *step = spec->step != NULL ? spec->step : "(none)";
    if (dropped == 0)
        return;
    (void)fprintf(stderr,
                  "vhpc: step %s.%s: %" PRIu64 " bytes of its output are missing: %s; "
                  "make room, or have the output elsewhere (sbatch --output)\n",
                  job != NULL ? job : "(none)", step, dropped, strerror(reason));
}
