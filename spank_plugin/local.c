/* SPDX-License-Identifier: Apache-2.0 */
/*
 * srun within a job: the job's guests exist already, and the options of a step must agree with
 * them.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plugin.h"
#include "text.h"

/* The job of this shell and its image, if the environment has them. */
static uint64_t shell_job;
static char shell_image[VHPC_VALUE_SIZE];

/* The image of the generation that the shell runs in, if it belongs to the shell's job. */
static const char *image_of_generation(const char *job)
{
    const char *generation = getenv(VHPC_ENV_JOB_GENERATION);
    size_t length = strlen(job);

    if (generation == NULL || strncmp(generation, job, length) != 0 || generation[length] != '.')
        return NULL;
    return getenv(VHPC_ENV_JOB_IMAGE);
}

/*
 * The job's image can be found in tasks in what remote.c has set, in salloc's shell on the login
 * node in Slurm's variable for the option, and in a script with a reduced environment in what
 * sbatch passes down.  It is read before Slurm overwrites its variable with this step's own option.
 */
void vhpc_local_init(void)
{
    const char *job = getenv("SLURM_JOB_ID");
    const char *image = NULL;
    char name[VHPC_NAME_SIZE];

    shell_image[0] = '\0';
    if (job != NULL && vhpc_text_number(job, strlen(job), UINT32_MAX, &shell_job))
        image = image_of_generation(job);
    if (image == NULL)
        image = getenv(vhpc_carrier(VHPC_IMAGE, name));
    if (image == NULL)
        image = getenv("SLURM_SPANK_VHPC_IMAGE");
    if (image != NULL && strlen(image) < sizeof shell_image) {
        snprintf(shell_image, sizeof shell_image, "%s", image);
        /* Tells the tasks that the job has guests, whatever other variables reach them. */
        (void)setenv(vhpc_carrier(VHPC_IMAGE, name), shell_image, 1);
    }
    vhpc_forget_handed_down();
}

/*
 * The VHPC_* defaults are not read: they were for the job, which may have been given options
 * instead.
 */
int vhpc_local_post_opt(void)
{
    for (int id = 0; id < VHPC_OPTION_COUNT; id++) {
        if (id != VHPC_IMAGE && vhpc_plugin.given.set[id]) {
            slurm_error("vhpc: --%s is an option of a whole job, not of a step; give it to sbatch, "
                        "salloc or the srun that creates the job",
                        vhpc_options[id].name);
            return -1;
        }
    }
    return 0;
}

/* The first callback that knows the job: --jobid may name another job than the shell's. */
int vhpc_local_user_init(spank_t spank)
{
    struct vhpc_values job = {0};
    char shown[VHPC_SHOWN_SIZE];
    char why[VHPC_WHY_SIZE];
    uint32_t id = 0;
    const char *asked = vhpc_plugin.given.text[VHPC_IMAGE];

    if (!vhpc_plugin.given.set[VHPC_IMAGE] || shell_image[0] == '\0' ||
        spank_get_item(spank, S_JOB_ID, &id) != ESPANK_SUCCESS || id != shell_job)
        return 0;
    if (!vhpc_values_set(&job, VHPC_IMAGE, "", shell_image, why, sizeof why) ||
        strcmp(job.text[VHPC_IMAGE], asked) == 0)
        return 0;
    slurm_error("vhpc: this step asks for the image %s, but the guests of job %u run %s; drop "
                "--vhpc-image from the step or submit a job of its own",
                asked, id, vhpc_text_shown(job.text[VHPC_IMAGE], shown, sizeof shown));
    return -1;
}
