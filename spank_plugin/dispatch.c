/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Entry points of the SPANK plugin.  Slurm loads it into sbatch, salloc, srun, scrontab, slurmd and
 * slurmstepd; here each call is passed to the file of its context.  job_prolog and job_epilog stay
 * undefined: if they exist, slurmd removes option variables from the environment of Prolog.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "exported.h"
#include "plugin.h"
#include "waiting.h"

SPANK_PLUGIN(vhpc, 1)

enum role { ROLE_NONE, ROLE_ALLOCATOR, ROLE_LOCAL, ROLE_REMOTE };

static enum role role;

/* srun creates a job unless it runs in one. */
static enum role role_of(spank_context_t context)
{
    switch (context) {
    case S_CTX_ALLOCATOR:
        return ROLE_ALLOCATOR;
    case S_CTX_LOCAL:
        return getenv("SLURM_JOB_ID") == NULL ? ROLE_ALLOCATOR : ROLE_LOCAL;
    case S_CTX_REMOTE:
        return ROLE_REMOTE;
    case S_CTX_ERROR:
    case S_CTX_SLURMD:
    case S_CTX_JOB_SCRIPT:
        break;
    }
    return ROLE_NONE;
}

static bool is_program(const char *name)
{
    return strcmp(program_invocation_short_name, name) == 0;
}

/* List for the guests which variables --export names; jobs without guests get no such variable. */
static void tell_exported(void)
{
    static char text[65536];
    static char *words[1024];
    static bool told; /* components of a heterogeneous job share an environment */
    struct vhpc_srun_words said = {0};
    char name[VHPC_NAME_SIZE];
    bool has_guests = vhpc_plugin.given.set[VHPC_IMAGE] || vhpc_plugin.given.set[VHPC_RESUME] ||
                      getenv(vhpc_carrier(VHPC_IMAGE, name));

    if (told)
        return;
    told = true;
    if (is_program("sbatch"))
        said.exported = vhpc_sbatch_export();
    if (is_program("srun")) {
        said = vhpc_srun_words(vhpc_own_arguments(text, sizeof text, words, 1024), words);
        if (said.exported == NULL)
            said.exported = getenv("SRUN_EXPORT_ENV");
        if (said.exported == NULL)
            said.exported = getenv("SLURM_EXPORT_ENV");
    }
    if (!vhpc_exported_set(has_guests || said.is_for_job ? said.exported : NULL))
        slurm_error("vhpc: couldn't set " VHPC_ENV_EXPORTED ": %s", strerror(errno));
}

/*
 * A wrong argument in plugstack.conf stops the commands and the start of slurmd.  In slurmstepd a
 * failure here would drain the node, and in 22.05 report the job as completed; therefore a task
 * that wants a guest reports it.
 */
int slurm_spank_init(spank_t spank, int argc, char *argv[])
{
    role = role_of(spank_context());
    if (!vhpc_args_read(&vhpc_plugin.args, argc, argv)) {
        slurm_error("vhpc: %s", vhpc_plugin.args.wrong);
        if (role != ROLE_REMOTE)
            return -1;
    }
    if (role == ROLE_NONE)
        return 0;
    if (vhpc_register_options(spank) != 0 && role != ROLE_REMOTE)
        return -1;
    if (is_program("sbatch"))
        vhpc_sbatch_hide_export();
    if (role == ROLE_ALLOCATOR)
        vhpc_allocator_init();
    if (role == ROLE_LOCAL)
        vhpc_local_init();
    return 0;
}

int slurm_spank_init_post_opt(spank_t spank, int argc, char *argv[])
{
    int rc = 0;

    (void)argc;
    (void)argv;
    if (role == ROLE_ALLOCATOR)
        rc = vhpc_allocator_post_opt(spank);
    if (role == ROLE_LOCAL)
        rc = vhpc_local_post_opt();
    if (role == ROLE_ALLOCATOR || role == ROLE_LOCAL)
        tell_exported();
    return rc;
}

int slurm_spank_local_user_init(spank_t spank, int argc, char *argv[])
{
    (void)argc;
    (void)argv;
    return role == ROLE_LOCAL ? vhpc_local_user_init(spank) : 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char *argv[])
{
    (void)argc;
    (void)argv;
    return role == ROLE_REMOTE ? vhpc_remote_task_init(spank) : 0;
}
