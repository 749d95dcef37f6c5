/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Declarations that the files of the plugin share.  Slurm loads the plugin into several programs.
 * Each of the context files below is for one kind of program, and only dispatch.c decides which is
 * used.
 */
#ifndef VHPC_SPANK_PLUGIN_H
#define VHPC_SPANK_PLUGIN_H

#include <slurm/spank.h>

#include "args.h"
#include "options.h"

/*
 * Exported into each task of a job with guests.  The generation begins with the job id: so a step
 * can tell whether both variables belong to its own job or were inherited from a job that submitted
 * this one.
 */
#define VHPC_ENV_JOB_GENERATION "VHPC_JOB_GENERATION"
#define VHPC_ENV_JOB_IMAGE "VHPC_JOB_IMAGE"
/* If nodes have several guests: how many, and in which of them the task runs. */
#define VHPC_ENV_JOB_GUESTS "VHPC_JOB_GUESTS"
#define VHPC_ENV_GUEST "VHPC_GUEST"

/* Not an image name, so each reader refuses the job: see vhpc_allocator_post_opt. */
#define VHPC_IMAGE_REFUSED "-"

struct vhpc_plugin {
    struct vhpc_args args;
    struct vhpc_values given; /* what the command line and #SBATCH lines set */
};

extern struct vhpc_plugin vhpc_plugin;

/* register.c: the option table in the form that Slurm expects. */
int vhpc_register_options(spank_t spank);
/* The option in the form that spank_option_getopt() expects. */
struct spank_option *vhpc_registered_option(enum vhpc_option_id id);
/* Longest name of a variable below, with its NUL. */
#define VHPC_NAME_SIZE 128
/* Name of the variable in which Slurm carries an option to the nodes. */
const char *vhpc_carrier(enum vhpc_option_id id, char name[VHPC_NAME_SIZE]);
/*
 * Remove the variables by which sbatch passes a job's options and job-control variables to the
 * commands in its script.  Otherwise the callback would get them as this command's own options.
 */
void vhpc_forget_handed_down(void);

/* allocator.c: a command that creates a job: sbatch, salloc, and srun outside of any job. */
void vhpc_allocator_init(void);
int vhpc_allocator_post_opt(spank_t spank);

/* local.c: srun that starts a step of an existing job. */
void vhpc_local_init(void);
int vhpc_local_post_opt(void);
int vhpc_local_user_init(spank_t spank);

/* remote.c: slurmstepd, between fork and exec of a task, as the job's user. */
int vhpc_remote_task_init(spank_t spank);

/*
 * remote_gpus.c: the indexes of GPUs in the guest begin at 0. Slurm's numbers are those of the
 * node; they are kept in VHPC_HOST_*.  A variable that cannot be translated stays as it is.
 * gpus_of_task: the GPUs of the task's guest (gpus.h).  False if a variable cannot be set.
 */
struct vhpc_state;
bool vhpc_renumber_gpus(spank_t spank, const char *gpus_of_task, const struct vhpc_state *state);

#endif
