/* SPDX-License-Identifier: Apache-2.0 */
#include "exported.h"

#include <stdlib.h>
#include <string.h>

#include "slurm_args.h"

static const char of_options[] = "SLURM_EXPORT_ENV";

static void see_option(void *arg, const char *name, const char *value)
{
    struct vhpc_srun_words *found = arg;

    if (strcmp(name, "export") == 0)
        found->exported = value;
    if (strcmp(name, "jobid") == 0)
        found->is_for_job = true;
}

/* The word after an option of another plugin is taken for its value. */
static bool is_operand(void *arg, const char *word)
{
    (void)arg;
    (void)word;
    return false;
}

struct vhpc_srun_words vhpc_srun_words(int argc, char *const *argv)
{
    struct vhpc_srun_words found = {0};
    const struct slurm_reader reader = {see_option, is_operand, &found};

    (void)slurm_args_read(SLURM_SRUN, argc, argv, &reader);
    return found;
}

/* Puts a name at *arg; the list cannot be longer than what it is read from. */
static void add_name(void *arg, const char *name, size_t len, bool has_value)
{
    char **end = arg;

    (void)has_value;
    memcpy(*end, name, len);
    *end += len;
    *(*end)++ = ',';
}

bool vhpc_exported_set(const char *value)
{
    char *list = calloc(1, value == NULL ? 1 : strlen(value) + 2);
    char *end = list;
    bool done;

    if (list == NULL)
        return false;
    if (value != NULL)
        slurm_export_read(value, add_name, &end);
    if (end > list)
        end[-1] = '\0';
    done = list[0] == '\0' ? unsetenv(VHPC_ENV_EXPORTED) == 0
                           : setenv(VHPC_ENV_EXPORTED, list, 1) == 0;
    free(list);
    return done;
}

static char *of_shell; /* SLURM_EXPORT_ENV of the submitting shell */

void vhpc_sbatch_hide_export(void)
{
    const char *value = getenv(of_options);

    free(of_shell);
    of_shell = value == NULL ? NULL : strdup(value);
    if (of_shell != NULL)
        (void)unsetenv(of_options);
}

const char *vhpc_sbatch_export(void)
{
    static char *found;
    const char *value = getenv(of_options);

    free(found);
    found = value == NULL ? NULL : strdup(value);
    if (of_shell != NULL)
        (void)setenv(of_options, of_shell, 1);
    return found;
}
