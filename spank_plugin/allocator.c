/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A command that creates a job: check the options and pass them to the job's control environment.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "environment.h"
#include "image.h"
#include "inherited.h"
#include "plugin.h"
#include "source.h"
#include "text.h"
#include "waiting.h"

/*
 * A job may be submitted from within a job with guests.  With the variables of that job in the
 * environment, the new one would look as if it had asked for an image.
 */
void vhpc_allocator_init(void)
{
    char name[VHPC_NAME_SIZE];

    for (int id = 0; id < VHPC_OPTION_COUNT; id++)
        unsetenv(vhpc_carrier((enum vhpc_option_id)id, name));
    vhpc_forget_handed_down();
    vhpc_forget_guest();
}

/*
 * An option that is not given takes its value from its variable; an empty variable counts as
 * absent.
 */
static bool add_default(struct vhpc_values *values, enum vhpc_option_id id, char *why, size_t size)
{
    const char *variable = vhpc_options[id].variable;
    const char *text = getenv(variable);

    if (values->set[id] || text == NULL || text[0] == '\0')
        return true;
    return vhpc_values_set(values, id, variable, text, why, size);
}

/* Whether this command gives the job a batch script. */
static bool has_script(void)
{
    return strcmp(program_invocation_short_name, "sbatch") == 0;
}

/* Whether an option needs a batch script in the guest. */
static bool needs_script(enum vhpc_option_id id)
{
    return id == VHPC_SAVE || id == VHPC_CHECKPOINT;
}

/* --vhpc-save waits for the end of a script in the guest; --vhpc-checkpoint saves one that runs. */
static bool can_save(const struct vhpc_values *values, char *why, size_t size)
{
    bool on_host = values->set[VHPC_BATCH] && strcmp(values->text[VHPC_BATCH], "host") == 0;
    bool checkpoint =
        values->set[VHPC_CHECKPOINT] && strcmp(values->text[VHPC_CHECKPOINT], "none") != 0;

    if (values->set[VHPC_SAVE] && !has_script())
        snprintf(why, size,
                 "--vhpc-save waits for the end of a batch script, so it is for sbatch only; while "
                 "another job runs, use: vhpc save JOBID own/NAME");
    else if (values->set[VHPC_SAVE] && on_host)
        snprintf(why, size,
                 "--vhpc-save saves the guest of the batch script, which --vhpc-batch=host leaves "
                 "outside; remove one of the two");
    else if (checkpoint && !has_script())
        snprintf(why, size,
                 "--vhpc-checkpoint puts a batch script back into the queue, so it is for sbatch "
                 "only; remove it");
    else if (checkpoint && on_host)
        snprintf(why, size,
                 "--vhpc-checkpoint saves the guest of the batch script, which --vhpc-batch=host "
                 "leaves outside; remove one of the two");
    else
        return true;
    return false;
}

/* Have the image that the value of the option means; false with one line in why. */
static bool settle_image(struct vhpc_values *values, char *why, size_t size)
{
    char source[VHPC_VALUE_SIZE];

    if (strncmp(values->text[VHPC_IMAGE], VHPC_OF_CHECKPOINT, strlen(VHPC_OF_CHECKPOINT)) == 0) {
        snprintf(why, size, "--vhpc-image=%.80s is no image; use --vhpc-resume=NAME",
                 values->text[VHPC_IMAGE]);
        return false;
    }
    if (strcmp(values->text[VHPC_IMAGE], VHPC_IMAGE_LIST) == 0) {
        vhpc_source_list(vhpc_plugin.args.command, why, size);
        return false;
    }
    if (!vhpc_is_source(values->text[VHPC_IMAGE]))
        return true;
    memcpy(source, values->text[VHPC_IMAGE], sizeof source);
    return vhpc_source_resolve(vhpc_plugin.args.command, source, values->text[VHPC_IMAGE], why,
                               size);
}

/*
 * A job that continues a checkpoint has all of its guests from there.  The name of the checkpoint
 * takes the place of the image: by that, scripts and tasks know a job with guests.
 */
static bool settle_resumed(struct vhpc_values *values, char *why, size_t size)
{
    if (!has_script()) {
        snprintf(why, size,
                 "--vhpc-resume continues a batch script, so it is for sbatch only; remove it");
        return false;
    }
    for (int id = 0; id < VHPC_OPTION_COUNT; id++) {
        if (id == VHPC_RESUME || id == VHPC_TIMEOUT || id == VHPC_CONSOLE ||
            id == VHPC_CHECKPOINT) {
            if (!add_default(values, (enum vhpc_option_id)id, why, size))
                return false;
        } else if (values->set[id]) {
            snprintf(why, size,
                     "--%s cannot be given with --vhpc-resume, whose guests exist already; remove "
                     "one of the two",
                     vhpc_options[id].name);
            return false;
        }
    }
    snprintf(values->text[VHPC_IMAGE], sizeof values->text[VHPC_IMAGE], "%s%.*s",
             VHPC_OF_CHECKPOINT, VHPC_CHECKPOINT_MAX, values->text[VHPC_RESUME]);
    values->set[VHPC_IMAGE] = true;
    return true;
}

/* Whether the user has asked for nothing that needs an image. */
static bool needs_no_image(const struct vhpc_values *values, char *why, size_t size)
{
    for (int id = 0; id < VHPC_OPTION_COUNT; id++) {
        if (values->set[id]) {
            snprintf(why, size,
                     "--%s has no effect without an image; add --vhpc-image=NAME or remove it",
                     vhpc_options[id].name);
            return false;
        }
    }
    return true;
}

/* An option that has no value takes it from the file. */
static void add_from_file(struct vhpc_values *values, const struct vhpc_values *file,
                          enum vhpc_option_id id)
{
    if (values->set[id] || !file->set[id])
        return;
    memcpy(values->text[id], file->text[id], sizeof values->text[id]);
    values->set[id] = values->from_file[id] = true;
}

/* False with one line in why. True with values->set[VHPC_IMAGE] false: a job without guests. */
static bool settle(struct vhpc_values *values, char *why, size_t size)
{
    static struct vhpc_values file;
    bool asked = values->set[VHPC_ENVIRONMENT];

    memset(&file, 0, sizeof file);
    if (!values->set[VHPC_IMAGE] && !add_default(values, VHPC_RESUME, why, size))
        return false;
    if (values->set[VHPC_RESUME])
        return settle_resumed(values, why, size);
    if (!add_default(values, VHPC_IMAGE, why, size) ||
        !add_default(values, VHPC_ENVIRONMENT, why, size) ||
        (values->set[VHPC_ENVIRONMENT] &&
         !vhpc_environment_read(vhpc_plugin.args.command, values->text[VHPC_ENVIRONMENT], &file,
                                why, size)))
        return false;
    add_from_file(values, &file, VHPC_IMAGE);
    if (!values->set[VHPC_IMAGE]) {
        values->set[VHPC_ENVIRONMENT] = asked; /* its variable is for jobs with an image */
        return needs_no_image(values, why, size);
    }
    if (!settle_image(values, why, size))
        return false;
    for (int id = 0; id < VHPC_OPTION_COUNT; id++) {
        if (id == VHPC_RESUME || (needs_script((enum vhpc_option_id)id) && !has_script()))
            continue;
        if (!add_default(values, (enum vhpc_option_id)id, why, size))
            return false;
        add_from_file(values, &file, (enum vhpc_option_id)id);
    }
    return can_save(values, why, size);
}

/* Say which options the file has set; false if Slurm refuses it. */
static bool hand_over_file(spank_t spank, const struct vhpc_values *values)
{
    char names[VHPC_OPTION_COUNT * SPANK_OPTION_MAXLEN] = "";
    size_t used = 0;

    for (int id = 0; id < VHPC_OPTION_COUNT; id++)
        if (values->from_file[id])
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s",
                                     used == 0 ? "" : ",", vhpc_options[id].name + strlen("vhpc-"));
    return !values->set[VHPC_ENVIRONMENT] ||
           spank_job_control_setenv(spank, "VHPC_ENVIRONMENT_SET", names, 1) == ESPANK_SUCCESS;
}

static int hand_over(spank_t spank, const struct vhpc_values *values)
{
    static const enum vhpc_option_id of_tasks[] = {VHPC_IMAGE, VHPC_SAVE};
    char name[VHPC_NAME_SIZE];

    for (int id = 0; id < VHPC_OPTION_COUNT; id++) {
        spank_err_t error;

        if (!values->set[id])
            continue;
        error = spank_job_control_setenv(spank, vhpc_options[id].variable, values->text[id], 1);
        if (error != ESPANK_SUCCESS) {
            slurm_error("vhpc: couldn't pass on --%s: %s", vhpc_options[id].name,
                        spank_strerror(error));
            return -1;
        }
    }
    if (!hand_over_file(spank, values)) {
        slurm_error("vhpc: couldn't pass on which options --vhpc-environment has set");
        return -1;
    }
    /*
     * Slurm passes an option of the command line to the tasks. An option from its variable must
     * reach them in the same way: there the image prevents that a job without a guest runs on the
     * bare node.
     */
    for (size_t i = 0; i < sizeof of_tasks / sizeof of_tasks[0]; i++) {
        if (values->set[of_tasks[i]] &&
            setenv(vhpc_carrier(of_tasks[i], name), values->text[of_tasks[i]], 1) != 0) {
            slurm_error("vhpc: couldn't set %s: %s", name, strerror(errno));
            return -1;
        }
    }
    /* If it is inherited from a requeued job, the new job would take it for its own. */
    unsetenv("SLURM_RESTART_COUNT");
    return 0;
}

/* Say how far the guests are while this command waits for them; components have one watcher. */
static void watch_boot(spank_t spank)
{
    static char word[VHPC_WAITER_SIZE];
    static char text[65536];
    static char *argv[1024];
    bool first = word[0] == '\0';

    if (first && (vhpc_own_arguments(text, sizeof text, argv, sizeof argv / sizeof argv[0]) == 0 ||
                  !vhpc_somebody_waits(program_invocation_short_name, argv, getenv("VHPC_QUIET"),
                                       STDERR_FILENO) ||
                  !vhpc_waiter_word(word)))
        return;
    if (spank_job_control_setenv(spank, "VHPC_WAITER", word, 1) == ESPANK_SUCCESS && first)
        vhpc_watch_boot(vhpc_plugin.args.command, word);
}

int vhpc_allocator_post_opt(spank_t spank)
{
    static struct vhpc_values
        values; /* 16 KiB; one thread, and a copy per component of a het job */
    char why[VHPC_WHY_SIZE];
    char name[VHPC_NAME_SIZE];

    values = vhpc_plugin.given;
    if (settle(&values, why, sizeof why)) {
        if (!values.set[VHPC_IMAGE])
            return 0;
        if (hand_over(spank, &values) != 0)
            return -1;
        watch_boot(spank);
        return 0;
    }
    slurm_error("vhpc: %s", why);
    /*
     * If plugstack.conf calls the plugin "optional", Slurm continues after this error.  The job
     * must not run outside of guests then: with this value the controller and the tasks refuse it.
     */
    (void)spank_job_control_setenv(spank, vhpc_options[VHPC_IMAGE].variable, VHPC_IMAGE_REFUSED, 1);
    (void)setenv(vhpc_carrier(VHPC_IMAGE, name), VHPC_IMAGE_REFUSED, 1);
    return -1;
}
