/* SPDX-License-Identifier: Apache-2.0 */
/* The variables with numbers of GPUs, for a task that runs in a guest. */
#include <string.h>

#include "gpus.h"
#include "plugin.h"
#include "state.h"

/* Slurm's list of the job's or the step's GPUs, by the node's numbers; "" if there is none. */
static void read_host_gpus(spank_t spank, char *list, size_t size)
{
    static const char *const names[] = {"SLURM_STEP_GPUS", "SLURM_JOB_GPUS"};

    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (spank_getenv(spank, names[i], list, (int)size) == ESPANK_SUCCESS && list[0] != '\0')
            return;
    list[0] = '\0';
}

/*
 * Steps inherit the environment of the script that started them. A variable that was renumbered for
 * the script, in its own guest, and that Slurm has not set again, must not be renumbered again.
 * True with before as its value before that.
 */
static bool is_renumbered(spank_t spank, const struct vhpc_state *state, const char *host,
                          const char *kept, bool visible, const char *value, char *before)
{
    char gpus[VHPC_GPUS_SIZE];
    char after[VHPC_GPUS_SIZE];

    if (spank_getenv(spank, kept, before, VHPC_GPUS_SIZE) != ESPANK_SUCCESS)
        return false;
    for (uint32_t guest = 0; guest < state->guests; guest++) {
        if (!vhpc_state_gpus(state, guest, gpus, sizeof gpus))
            return false;
        if ((state->guests == 1
                 ? vhpc_gpus_renumber(gpus, before, after, sizeof after)
                 : vhpc_gpus_share(gpus, host, before, visible, after, sizeof after)) &&
            strcmp(after, value) == 0)
            return true;
    }
    return false;
}

bool vhpc_renumber_gpus(spank_t spank, const char *gpus_of_task, const struct vhpc_state *state)
{
    static const struct {
        const char *name;
        const char *kept;
        bool visible; /* may have indexes as well as the node's numbers */
    } variables[] = {
        {"CUDA_VISIBLE_DEVICES", "VHPC_HOST_CUDA_VISIBLE_DEVICES", true},
        {"ROCR_VISIBLE_DEVICES", "VHPC_HOST_ROCR_VISIBLE_DEVICES", true},
        {"GPU_DEVICE_ORDINAL", "VHPC_HOST_GPU_DEVICE_ORDINAL", true},
        {"ZE_AFFINITY_MASK", "VHPC_HOST_ZE_AFFINITY_MASK", true},
        {"SLURM_JOB_GPUS", "VHPC_HOST_SLURM_JOB_GPUS", false},
        {"SLURM_STEP_GPUS", "VHPC_HOST_SLURM_STEP_GPUS", false},
    };
    char host[VHPC_GPUS_SIZE];
    char value[VHPC_GPUS_SIZE];
    char ours[VHPC_GPUS_SIZE];
    bool shared = state->guests > 1;

    if (state->gpus[0] == '\0')
        return true;
    read_host_gpus(spank, host, sizeof host);
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) {
        bool visible = variables[i].visible;

        if (spank_getenv(spank, variables[i].name, value, sizeof value) != ESPANK_SUCCESS)
            continue;
        if (is_renumbered(spank, state, host, variables[i].kept, visible, value, ours)) {
            if (!shared)
                continue;
            memcpy(value, ours, strlen(ours) + 1); /* perhaps for another guest than this task's */
        }
        if (shared    ? !vhpc_gpus_share(gpus_of_task, host, value, visible, ours, sizeof ours)
            : visible ? !vhpc_gpus_renumber_visible(gpus_of_task, host, value, ours, sizeof ours)
                      : !vhpc_gpus_renumber(gpus_of_task, value, ours, sizeof ours))
            continue;
        if (spank_setenv(spank, variables[i].kept, value, 1) != ESPANK_SUCCESS ||
            spank_setenv(spank, variables[i].name, ours, 1) != ESPANK_SUCCESS)
            return false;
    }
    return true;
}
