/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Entry points of the SPANK plugin.  Slurm loads it into sbatch, salloc, srun, scrontab, slurmd and
 * slurmstepd; here each call is passed to the file of its context.  job_prolog and job_epilog stay
 * undefined: if they exist, slurmd removes option variables from the environment of Prolog.
 */
#include <stdlib.h>

#include "plugin.h"

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
    if (role == ROLE_ALLOCATOR)
        vhpc_allocator_init();
    if (role == ROLE_LOCAL)
        vhpc_local_init();
    return 0;
}

int slurm_spank_init_post_opt(spank_t spank, int argc, char *argv[])
{
    (void)argc;
    (void)argv;
    if (role == ROLE_ALLOCATOR)
        return vhpc_allocator_post_opt(spank);
    if (role == ROLE_LOCAL)
        return vhpc_local_post_opt();
    return 0;
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
