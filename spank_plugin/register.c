/* SPDX-License-Identifier: Apache-2.0 */
/* Registers the options of the table with Slurm; the callback receives their values. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plugin.h"
#include "text.h"

static struct spank_option registered[VHPC_OPTION_COUNT];

/*
 * Called for the command line, for #SBATCH lines, and with remote set in slurmstepd.  slurmstepd
 * checks nothing here: the value comes from the user, and is compared with root's state file where
 * it matters.
 */
static int on_option(int value, const char *text, int remote)
{
    enum vhpc_option_id id = (enum vhpc_option_id)value;
    char origin[SPANK_OPTION_MAXLEN + 3];
    char why[VHPC_WHY_SIZE];

    if (remote != 0)
        return 0;
    snprintf(origin, sizeof origin, "--%s", vhpc_options[id].name);
    /* scrontab parses SPANK options and then ignores them: the job would run without guests. */
    if (strcmp(program_invocation_short_name, "scrontab") == 0) {
        slurm_error("vhpc: %s has no effect in a crontab; let the crontab's command be an sbatch "
                    "with this option",
                    origin);
        return -1;
    }
    if (!vhpc_values_set(&vhpc_plugin.given, id, origin, text == NULL ? "" : text, why,
                         sizeof why)) {
        slurm_error("vhpc: %s", why);
        return -1;
    }
    return 0;
}

struct spank_option *vhpc_registered_option(enum vhpc_option_id id)
{
    const struct vhpc_option *option = &vhpc_options[id];

    /* Slurm's struct has no const; Slurm copies the strings and does not change them. */
    registered[id] = (struct spank_option){
        .name = (char *)option->name,
        .arginfo = (char *)option->arginfo,
        .usage = (char *)option->usage,
        .has_arg = 1,
        .val = (int)id,
        .cb = on_option,
    };
    return &registered[id];
}

int vhpc_register_options(spank_t spank)
{
    for (int id = 0; id < VHPC_OPTION_COUNT; id++) {
        spank_err_t error =
            spank_option_register(spank, vhpc_registered_option((enum vhpc_option_id)id));
        if (error != ESPANK_SUCCESS) {
            slurm_error("vhpc: couldn't register --%s: %s", vhpc_options[id].name,
                        spank_strerror(error));
            return -1;
        }
    }
    return 0;
}

const char *vhpc_carrier(enum vhpc_option_id id, char name[VHPC_NAME_SIZE])
{
    snprintf(name, VHPC_NAME_SIZE, "_SLURM_SPANK_OPTION_vhpc_%s", vhpc_options[id].name);
    for (char *c = name; *c != '\0'; c++)
        if (!isalnum((unsigned char)*c))
            *c = '_';
    return name;
}

void vhpc_forget_handed_down(void)
{
    char name[VHPC_NAME_SIZE + sizeof "SLURM_SPANK_"];
    char carrier[VHPC_NAME_SIZE];

    for (int id = 0; id < VHPC_OPTION_COUNT; id++) {
        snprintf(name, sizeof name, "SLURM_SPANK_%s",
                 vhpc_carrier((enum vhpc_option_id)id, carrier));
        unsetenv(name);
        snprintf(name, sizeof name, "SLURM_SPANK_%s", vhpc_options[id].variable);
        unsetenv(name);
    }
}
