/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slurmstepd, as the job's user, between fork and exec of a task.  This is the only callback whose
 * failure ends a job cleanly in each version of Slurm, so it reports what the node's hooks have
 * found to be the user's mistake.
 *
 * It runs in the task's own process: the end of the process frees its memory, and its fd 2 is the
 * user's stderr.
 */
#include <limits.h>
#include <slurm/slurm.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "argv.h"
#include "gpus.h"
#include "image.h"
#include "plugin.h"
#include "state.h"
#include "text.h"

#define ROOT 0
#define LINE_SIZE (VHPC_STATE_LINE_MAX + VHPC_WHY_SIZE)

struct task {
    uint32_t job;
    uint32_t step;
    uint32_t restart;
    bool restart_known;
    const char *image;   /* what the option asked for, NULL when it was not given */
    const char *save;    /* the image that the batch script's guest becomes, NULL: none */
    bool asked;          /* the job or the step wants guests, even if this node has none */
    char generation[64]; /* generation that an earlier task of this job ran in, "" if unknown */
    char node[256];
    uint32_t guest;                 /* which of the node's guests it runs in */
    char socket[PATH_MAX];          /* of that guest */
    char gpus[VHPC_GPUS_SIZE];      /* of that guest */
    char cpus[VHPC_STATE_LINE_MAX]; /* of the node, for each CPU of that guest; "" if unknown */
};

/*
 * Print the reason, once per node and step, and end the task's process as Slurm does when this
 * callback fails: by _exit(1), before execve().  A failure that is returned would have slurmstepd
 * print two more lines into the user's stderr after ours; with a plugin that plugstack.conf calls
 * "optional" Slurm would ignore it and execute the task outside of the guest.
 */
__attribute__((format(printf, 2, 3), noreturn)) static void deny(spank_t spank, const char *format,
                                                                 ...)
{
    char line[LINE_SIZE];
    int task = 0;
    va_list words;

    if (spank_get_item(spank, S_TASK_ID, &task) != ESPANK_SUCCESS || task == 0) {
        va_start(words, format);
        vsnprintf(line, sizeof line, format, words);
        va_end(words);
        dprintf(STDERR_FILENO, "vhpc: %s\n", line);
    }
    _exit(EXIT_FAILURE);
}

/* A number from the task's environment; false if it is absent or not a number. */
static bool env_number(spank_t spank, const char *name, uint32_t *number)
{
    char text[16];
    uint64_t wide;

    if (spank_getenv(spank, name, text, sizeof text) != ESPANK_SUCCESS ||
        !vhpc_text_number(text, strlen(text), UINT32_MAX, &wide))
        return false;
    *number = (uint32_t)wide;
    return true;
}

/*
 * S_SLURM_RESTART_COUNT is never filled in (seen in the sources of 22.05, 24.11 and 26.05).
 * slurmstepd sets the variable, for batch steps of requeued jobs.  Steps inherit it from the batch
 * script, so for them its absence means nothing.
 */
static void read_restart(spank_t spank, struct task *task)
{
    task->restart_known = env_number(spank, "SLURM_RESTART_COUNT", &task->restart);
    if (!task->restart_known && task->step == SLURM_BATCH_SCRIPT) {
        task->restart = 0;
        task->restart_known = true;
    }
}

static void read_generation(spank_t spank, struct task *task)
{
    char prefix[16];
    int length = snprintf(prefix, sizeof prefix, "%u.", task->job);

    if (spank_getenv(spank, VHPC_ENV_JOB_GENERATION, task->generation, sizeof task->generation) !=
            ESPANK_SUCCESS ||
        strncmp(task->generation, prefix, (size_t)length) != 0)
        task->generation[0] = '\0';
}

static bool read_task(spank_t spank, struct task *task)
{
    char *image = NULL;
    char *save = NULL;

    memset(task, 0, sizeof *task);
    if (spank_get_item(spank, S_JOB_ID, &task->job) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_STEPID, &task->step) != ESPANK_SUCCESS)
        return false;
    if (spank_option_getopt(spank, vhpc_registered_option(VHPC_IMAGE), &image) == ESPANK_SUCCESS)
        task->image = image == NULL ? "" : image;
    if (task->step == SLURM_BATCH_SCRIPT &&
        spank_option_getopt(spank, vhpc_registered_option(VHPC_SAVE), &save) == ESPANK_SUCCESS)
        task->save = save;
    read_restart(spank, task);
    read_generation(spank, task);
    if (spank_getenv(spank, "SLURMD_NODENAME", task->node, sizeof task->node) != ESPANK_SUCCESS)
        snprintf(task->node, sizeof task->node, "this node");
    task->asked = task->image != NULL || task->generation[0] != '\0';
    return true;
}

/* The interactive shell of salloc counts as the batch script. */
static bool is_script_like(const struct task *task)
{
    return task->step == SLURM_BATCH_SCRIPT || task->step == SLURM_INTERACTIVE_STEP;
}

__attribute__((noreturn)) static void deny_absent(spank_t spank, const struct task *task)
{
    char shown[VHPC_SHOWN_SIZE];

    if (task->image != NULL && task->generation[0] == '\0' && !is_script_like(task))
        deny(spank,
             "this step asks for the image %s, but job %u has no guests on %s; give "
             "--vhpc-image to the command that creates the job; if it was given there, tell "
             "the site's support that the vhpc Prolog did not run on this node",
             vhpc_text_shown(task->image, shown, sizeof shown), task->job, task->node);
    deny(spank,
         "job %u asked for guests, but none were started on %s; tell the site's support that "
         "the vhpc Prolog did not run there",
         task->job, task->node);
}

/*
 * Deny the task unless the guests run the step's own --vhpc-image, or the step has none.  The srun
 * that creates a job passes on what the user typed: the image of a source was made before the job
 * was created, and it is the job's.
 */
static void check_image(spank_t spank, const struct task *task, const struct vhpc_state *state)
{
    struct vhpc_values asked = {0};
    char shown[VHPC_SHOWN_SIZE];
    char why[VHPC_WHY_SIZE];

    if (task->image == NULL)
        return;
    if (!vhpc_values_set(&asked, VHPC_IMAGE, "--vhpc-image", task->image, why, sizeof why))
        deny(spank, "%s", why);
    if (vhpc_is_source(asked.text[VHPC_IMAGE]) || strcmp(asked.text[VHPC_IMAGE], state->image) == 0)
        return;
    deny(spank,
         "this step asks for the image %s, but the guests of job %u run %s; drop "
         "--vhpc-image from the step or submit a job of its own",
         asked.text[VHPC_IMAGE], task->job, vhpc_text_shown(state->image, shown, sizeof shown));
}

/* Deny the task unless the guest on this node belongs to this run of this job and is ready. */
static void check(spank_t spank, const struct task *task, const struct vhpc_state *state)
{
    bool stale = state->job != task->job ||
                 (task->restart_known && state->restart != task->restart) ||
                 (task->generation[0] != '\0' && strcmp(task->generation, state->generation) != 0);

    if (stale)
        deny(spank,
             "the guest on %s belongs to generation %s and not to this run of job %u; tell the "
             "site's support",
             task->node, state->generation, task->job);
    if (state->status == VHPC_FAILED)
        deny(spank, "%s", state->message);
    if (state->status != VHPC_READY)
        deny(spank, "the guest of job %u on %s is not ready; tell the site's support", task->job,
             task->node);
    check_image(spank, task, state);
}

/* All or nothing: variables of the user must not control vhpc-run. */
static bool set_environment(spank_t spank, const struct task *task, const struct vhpc_state *state,
                            bool runs_in_guest)
{
    bool attaches = runs_in_guest && task->step == SLURM_BATCH_SCRIPT && state->attach[0] != '\0';
    bool several = runs_in_guest && state->guests > 1;
    char guest[16];
    char guests[16];
    char components[16];
    char file[PATH_MAX]; /* the file was read just now, so its name fits */
    const struct {
        const char *name;
        const char *value; /* NULL: must not be set */
    } variables[] = {
        {VHPC_ENV_JOB_GENERATION, state->generation},
        {VHPC_ENV_JOB_IMAGE, state->image},
        {VHPC_ENV_JOB_GUESTS, several ? guests : NULL},
        {VHPC_ENV_GUEST, several ? guest : NULL},
        {"VHPC_RUN_SOCKET", runs_in_guest ? task->socket : NULL},
        {"VHPC_RUN_CPUS", runs_in_guest && task->cpus[0] != '\0' ? task->cpus : NULL},
        {"VHPC_RUN_COMMANDS", runs_in_guest ? state->commands : NULL},
        {"VHPC_RUN_COMMAND_PATH",
         runs_in_guest && state->command_path[0] != '\0' ? state->command_path : NULL},
        {"VHPC_RUN_COMPONENTS", runs_in_guest && state->components > 0 ? components : NULL},
        {"VHPC_RUN_STATE", runs_in_guest ? file : NULL},
        {"VHPC_RUN_SCRIPT", runs_in_guest && task->step == SLURM_BATCH_SCRIPT ? "1" : NULL},
        {"VHPC_RUN_ATTACH", attaches ? state->attach : NULL},
        {"VHPC_RUN_SAVE", runs_in_guest ? task->save : NULL},
        {"VHPC_RUN_SAVE_COMMAND",
         runs_in_guest && task->save != NULL ? vhpc_plugin.args.command : NULL},
        {VHPC_ENV_RUN_ARGV0, NULL},
    };

    snprintf(guest, sizeof guest, "%u", task->guest);
    snprintf(guests, sizeof guests, "%u", state->guests);
    snprintf(components, sizeof components, "%u", state->components);
    snprintf(file, sizeof file, "%s/jobs/%u/state", vhpc_plugin.args.run_dir, task->job);
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) {
        if (variables[i].value == NULL)
            (void)spank_unsetenv(spank, variables[i].name);
        else if (spank_setenv(spank, variables[i].name, variables[i].value, 1) != ESPANK_SUCCESS)
            return false;
    }
    return true;
}

/* Find out in which of the node's guests the task runs, and what that guest has. */
static bool find_guest(spank_t spank, struct task *task, const struct vhpc_state *state)
{
    uint32_t tasks = 0;
    int local_id = 0;

    if (spank_get_item(spank, S_TASK_ID, &local_id) != ESPANK_SUCCESS || local_id < 0 ||
        spank_get_item(spank, S_JOB_LOCAL_TASK_COUNT, &tasks) != ESPANK_SUCCESS) {
        if (state->guests > 1)
            return false;
        local_id = 0;
    }
    task->guest = vhpc_state_guest_of(state, (uint32_t)local_id, tasks);
    return vhpc_state_socket(state, task->guest, task->socket, sizeof task->socket) &&
           vhpc_state_gpus(state, task->guest, task->gpus, sizeof task->gpus) &&
           vhpc_state_cpus(state, task->guest, task->cpus, sizeof task->cpus);
}

/*
 * Once in a job: by the script, or by the first step of a job without a script. Steps of a script
 * have inherited the generation.
 */
static void warn(spank_t spank, const struct task *task, const struct vhpc_state *state)
{
    uint32_t number = 0;

    if (state->warning[0] == '\0')
        return;
    if (!is_script_like(task) &&
        (task->step != 0 || task->generation[0] != '\0' ||
         spank_get_item(spank, S_TASK_GLOBAL_ID, &number) != ESPANK_SUCCESS || number != 0))
        return;
    dprintf(STDERR_FILENO, "vhpc: %s\n", state->warning);
}

static void enter_guest(spank_t spank, struct task *task, const struct vhpc_state *state)
{
    static char path[VHPC_DIR_SIZE + sizeof "/vhpc-run"]; /* lives until execve() */
    bool runs_in_guest = !(state->batch_on_host && is_script_like(task));
    const char *why = NULL;

    if (runs_in_guest && !find_guest(spank, task, state))
        deny(spank, "%s: couldn't tell which guest this task runs in; tell the site's support",
             task->node);
    if (!set_environment(spank, task, state, runs_in_guest))
        deny(spank, "couldn't set the environment of the task");
    warn(spank, task, state);
    if (!runs_in_guest)
        return;
    if (!vhpc_renumber_gpus(spank, task->gpus, state))
        deny(spank, "couldn't set the environment of the task");
    snprintf(path, sizeof path, "%s/vhpc-run", vhpc_plugin.args.libexec);
    if (access(path, X_OK) != 0)
        deny(spank, "%s: %s cannot be executed; tell the site's support", task->node, path);
    if (!vhpc_argv_wrap(spank, path, &why))
        deny(spank, "%s", why);
}

int vhpc_remote_task_init(spank_t spank)
{
    struct vhpc_state state;
    struct task task;
    char why[PATH_MAX + VHPC_WHY_SIZE];

    if (!read_task(spank, &task))
        return 0; /* without a job id this cannot be a job with guests */
    switch (vhpc_state_read(&state, vhpc_plugin.args.run_dir, task.job, ROOT, why, sizeof why)) {
    case VHPC_STATE_ABSENT:
        if (task.asked)
            deny_absent(spank, &task);
        return 0;
    case VHPC_STATE_BAD:
        deny(spank, "%s: %s; tell the site's support", task.node, why);
    case VHPC_STATE_OK:
        break;
    }
    if (vhpc_plugin.args.wrong[0] != '\0')
        deny(spank, "%s: %s", task.node, vhpc_plugin.args.wrong);
    check(spank, &task, &state);
    enter_guest(spank, &task, &state);
    vhpc_state_free(&state);
    return 0;
}
