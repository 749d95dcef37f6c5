/* SPDX-License-Identifier: Apache-2.0 */
/* PMI is not relayed into guests: how steps that have it are handled. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "run.h"

enum { EXIT_USAGE = 64 };

/* Variables that Slurm's plugins set for tasks: mpi/pmi2, mpi/pmix, mpi/cray_shasta. */
static const char *const prefixes[] = {"PMI_", "PMI2_", "PMIX_", "SLURM_PMI"};

static unsigned long number_of(const struct execspec *spec, const char *name)
{
    const char *text = execspec_getenv(spec, name);
    return text != NULL ? strtoul(text, NULL, 10) : 0;
}

static bool has_pmi(const struct execspec *spec)
{
    return execspec_getenv(spec, "PMI_FD") != NULL ||
           execspec_getenv(spec, "PMIX_NAMESPACE") != NULL;
}

/* Tasks of the step; in a heterogeneous job, tasks of this component. */
static bool has_one_task(const struct execspec *spec)
{
    return number_of(spec, "SLURM_STEP_NUM_TASKS") == 1 && number_of(spec, "SLURM_HET_SIZE") <= 1;
}

static int forbid(struct execspec *spec)
{
    const char *job = execspec_getenv(spec, "SLURM_JOB_ID");
    const char *step = execspec_getenv(spec, "SLURM_STEP_ID");
    const char *type = execspec_getenv(spec, "SLURM_MPI_TYPE");
    if (asprintf(
            &spec->pmi_refusal,
            "step %s.%s runs an MPI program in several tasks, but PMI (srun --mpi=%s) does not "
            "reach into guests yet: each task would be rank 0 of 1; in a job with one guest "
            "start the program with mpirun, or set VHPC_PMI=singleton to run each task as a "
            "separate program",
            job != NULL ? job : "?", step != NULL ? step : "?", type != NULL ? type : "...") >= 0)
        return 0;
    spec->pmi_refusal = NULL;
    return -ENOMEM;
}

int run_pmi(const struct run_options *o, struct execspec *spec)
{
    const char *wish = execspec_getenv(spec, "VHPC_PMI");
    bool single = wish != NULL && strcmp(wish, "singleton") == 0;
    if (wish != NULL && wish[0] != '\0' && !single && strcmp(wish, "refuse") != 0) {
        if (number_of(spec, "SLURM_LOCALID") == 0)
            (void)fprintf(stderr, "vhpc: VHPC_PMI=%.64s: must be refuse or singleton\n", wish);
        return EXIT_USAGE;
    }
    /*
     * A batch script has no PMI of its own: the variables were in the environment of its
     * submission.
     */
    if (o->script || !has_pmi(spec))
        return 0;
    if (!single && !has_one_task(spec))
        return forbid(spec);
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++)
        execspec_drop_env(spec, prefixes[i]);
    return 0;
}

bool run_pmi_refused(const struct execspec *spec, const struct front_result *r)
{
    if (spec->pmi_refusal == NULL || r->end != FRONT_REFUSED ||
        (r->text[0] != '\0' && strcmp(r->text, spec->pmi_refusal) != 0))
        return false;
    if (r->text[0] != '\0')
        (void)fprintf(stderr, "vhpc: %s\n", r->text);
    return true;
}
