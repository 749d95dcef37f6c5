/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A command that creates a job: check the options and pass them to the job's control environment.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "image.h"
#include "inherited.h"
#include "plugin.h"
#include "source.h"
#include "text.h"

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

/* False with one line in why. True with values->set[VHPC_IMAGE] false: a job without guests. */
static bool settle(struct vhpc_values *values, char *why, size_t size)
{
    if (!add_default(values, VHPC_IMAGE, why, size))
        return false;
    if (values->set[VHPC_IMAGE] && vhpc_is_source(values->text[VHPC_IMAGE])) {
        char source[VHPC_VALUE_SIZE];

        memcpy(source, values->text[VHPC_IMAGE], sizeof source);
        if (!vhpc_source_resolve(vhpc_plugin.args.command, source, values->text[VHPC_IMAGE], why,
                                 size))
            return false;
    }
    if (!values->set[VHPC_IMAGE]) {
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
    for (int id = 0; id < VHPC_OPTION_COUNT; id++)
        if (!add_default(values, (enum vhpc_option_id)id, why, size))
            return false;
    return true;
}

static int hand_over(spank_t spank, const struct vhpc_values *values)
{
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
    /*
     * Slurm passes an option of the command line to the tasks. An option from its variable must
     * reach them in the same way: there it prevents that a job without a guest runs on the bare
     * node.
     */
    if (setenv(vhpc_carrier(VHPC_IMAGE, name), values->text[VHPC_IMAGE], 1) != 0) {
        slurm_error("vhpc: couldn't set %s: %s", name, strerror(errno));
        return -1;
    }
    /* If it is inherited from a requeued job, the new job would take it for its own. */
    unsetenv("SLURM_RESTART_COUNT");
    return 0;
}

int vhpc_allocator_post_opt(spank_t spank)
{
    static struct vhpc_values values; /* 5 KiB; one thread, and a copy per component of a het job */
    char why[VHPC_WHY_SIZE];
    char name[VHPC_NAME_SIZE];

    values = vhpc_plugin.given;
    if (settle(&values, why, sizeof why))
        return values.set[VHPC_IMAGE] ? hand_over(spank, &values) : 0;
    slurm_error("vhpc: %s", why);
    /*
     * If plugstack.conf calls the plugin "optional", Slurm continues after this error.  The job
     * must not run outside of guests then: with this value the controller and the tasks refuse it.
     */
    (void)spank_job_control_setenv(spank, vhpc_options[VHPC_IMAGE].variable, VHPC_IMAGE_REFUSED, 1);
    (void)setenv(vhpc_carrier(VHPC_IMAGE, name), VHPC_IMAGE_REFUSED, 1);
    return -1;
}
