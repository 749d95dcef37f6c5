/* SPDX-License-Identifier: Apache-2.0 */
#include "argv.h"

#include <stddef.h>

#include "multi_prog.h"

/*
 * Since Slurm 23.02.5; the header of 22.05 does not declare it.  Weak, so that the plugin can be
 * loaded into a slurmstepd without this symbol.
 */
extern spank_err_t spank_prepend_task_argv(spank_t spank, int argc, const char *argv[])
    __attribute__((weak));

/*
 * S_JOB_ARGV is the vector that execve() gets, except for --multi-prog: its tasks have vectors of
 * their own that no item returns, and the job's vector is {file, contents of the file}.
 */
static bool swap(spank_t spank, const char *path, const char **why)
{
    int argc = 0;
    char **argv = NULL;

    if (spank_get_item(spank, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS || argc < 1 ||
        argv == NULL || argv[0] == NULL) {
        *why = "the task has no command";
        return false;
    }
    if (argc >= 2 && argv[1] != NULL && vhpc_argv_is_multi_prog(argv[1])) {
        *why = "this version of Slurm cannot run srun --multi-prog in guests; start the programs "
               "as steps of their own, or use Slurm 23.02.5 or later";
        return false;
    }
    if (spank_setenv(spank, VHPC_ENV_RUN_ARGV0, argv[0], 1) != ESPANK_SUCCESS) {
        *why = "couldn't set " VHPC_ENV_RUN_ARGV0;
        return false;
    }
    argv[0] = (char *)path; /* neither written nor freed between here and execve() */
    return true;
}

bool vhpc_argv_wrap(spank_t spank, const char *path, const char **why)
{
    const char *before[] = {path, "--"};

    if (spank_prepend_task_argv == NULL)
        return swap(spank, path, why);
    if (spank_prepend_task_argv(spank, 2, before) != ESPANK_SUCCESS) {
        *why = "couldn't prepend to the task's command";
        return false;
    }
    return true;
}
