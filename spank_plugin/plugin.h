/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the plugin share.  Slurm loads the plugin into several
 * programs; each of the context files below is used in one kind of them only,
 * and dispatch.c alone decides which.
 */
#ifndef VHPC_SPANK_PLUGIN_H
#define VHPC_SPANK_PLUGIN_H

#include <slurm/spank.h>

#include "args.h"
#include "options.h"

/*
 * Exported into every task of a job with guests.  The job id in front of the
 * generation tells a step whether the pair is its own job's or was inherited
 * from a job that submitted this one.
 */
#define VHPC_ENV_JOB_GENERATION "VHPC_JOB_GENERATION"
#define VHPC_ENV_JOB_IMAGE "VHPC_JOB_IMAGE"
/* Where nodes have several guests: how many, and which of them the task runs in. */
#define VHPC_ENV_JOB_GUESTS "VHPC_JOB_GUESTS"
#define VHPC_ENV_GUEST "VHPC_GUEST"

/* No image name, so whoever reads it refuses the job: see vhpc_allocator_post_opt. */
#define VHPC_IMAGE_REFUSED "-"

struct vhpc_plugin {
    struct vhpc_args args;
    struct vhpc_values given; /* what the command line and #SBATCH lines set */
};

extern struct vhpc_plugin vhpc_plugin;

/* register.c: the option table as Slurm wants it. */
int vhpc_register_options(spank_t spank);
/* The option as spank_option_getopt() wants it. */
struct spank_option *vhpc_registered_option(enum vhpc_option_id id);
/* Longest name of a variable below, with its NUL. */
#define VHPC_NAME_SIZE 128
/* Name of the variable in which Slurm carries an option to the nodes. */
const char *vhpc_carrier(enum vhpc_option_id id, char name[VHPC_NAME_SIZE]);
/*
 * Remove the variables by which sbatch hands a job's options and job-control
 * variables down to the commands in its script.  They would come back as this
 * command's own options, through the callback.
 */
void vhpc_forget_handed_down(void);

/* allocator.c: a command that creates a job: sbatch, salloc, and srun outside of any job. */
void vhpc_allocator_init(void);
int vhpc_allocator_post_opt(spank_t spank);

/* local.c: srun starting a step of a job that exists. */
void vhpc_local_init(void);
int vhpc_local_post_opt(void);
int vhpc_local_user_init(spank_t spank);

/* remote.c: slurmstepd, between fork and exec of a task, as the job's user. */
int vhpc_remote_task_init(spank_t spank);

#endif
