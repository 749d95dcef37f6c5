/* SPDX-License-Identifier: Apache-2.0 */
/* Command lines of Slurm: where the script or command begins, and which values options have. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "slurm_args.h"

static char seen[512];

static void note(void *arg, const char *name, const char *value)
{
    size_t len = strlen(seen);
    (void)arg;
    (void)snprintf(seen + len, sizeof seen - len, "%s%s=%s", len > 0 ? " " : "", name, value);
}

static bool is_job(void *arg, const char *word)
{
    (void)arg;
    return strcmp(word, "job") == 0;
}

/* Splits the line at spaces; returns the operand's text, or "-". */
static const char *operand_of(enum slurm_program program, const char *line)
{
    static char text[512], *argv[64];
    static const struct slurm_reader reader = {.option = note, .operand = is_job};
    int argc = 0;
    seen[0] = '\0';
    (void)snprintf(text, sizeof text, "%s", line);
    for (char *save = NULL, *w = strtok_r(text, " ", &save); w != NULL;
         w = strtok_r(NULL, " ", &save))
        argv[argc++] = w;
    argv[argc] = NULL;
    int operand = slurm_args_read(program, argc, argv, &reader);
    assert_true(operand <= argc);
    return operand < argc ? argv[operand] : "-";
}

static void the_operand_is_found(void **state)
{
    static const struct {
        const char *line, *operand, *seen;
    } cases[] = {
        {"sbatch", "-", ""},
        {"sbatch job", "job", ""},
        {"sbatch - job", "-", ""},
        {"sbatch -N2 job -n 4", "job", "nodes=2"},
        {"sbatch -N 2 job", "job", "nodes=2"},
        {"sbatch -HN 2 job", "job", "hold= nodes=2"},
        {"sbatch -k job", "job", "no-kill="},
        {"sbatch -kset job", "job", "no-kill="},
        {"sbatch --nodes 2 --time=5 job", "job", "nodes=2 time=5"},
        {"sbatch --output= job", "job", "output="},
        {"sbatch --requeue=expedite job", "job", "requeue=expedite"},
        {"sbatch --nice job", "job", "nice="},
        {"sbatch --mem 5 --mem-per-cpu 6 job", "job", "mem=5 mem-per-cpu=6"},
        {"sbatch --gpus 1 --gpus-per-node 1 job", "job", "gpus=1 gpus-per-node=1"},
        {"sbatch --hold job", "job", "hold="},
        {"sbatch --depend afterok:5 job", "job", "dependency=afterok:5"},
        {"sbatch --wait job", "job", "wait="},
        {"sbatch -W job", "job", ""},
        {"sbatch -n 4 -- job", "job", "ntasks=4"},
        {"sbatch -n 4 --", "-", "ntasks=4"},
        {"sbatch --nodes", "-", "nodes="},
        {"sbatch -n", "-", "ntasks="},
        {"sbatch -N1 : -N2 job", "job", "nodes=1 nodes=2"},
        {"sbatch --vhpc-image debian job", "job", ""},
        {"sbatch --spank job", "job", ""},
        {"sbatch --spank value job", "job", ""},
        {"sbatch --spank=value job", "job", ""},
        {"sbatch --spank -N1 job", "job", "nodes=1"},
        {"sbatch -; job", "job", ""},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_string_equal(operand_of(SLURM_SBATCH, cases[i].line), cases[i].operand);
        assert_string_equal(seen, cases[i].seen);
    }
}

static void srun_has_letters_of_its_own(void **state)
{
    (void)state;
    assert_string_equal(operand_of(SLURM_SRUN, "srun -K job"), "job");
    assert_string_equal(seen, "kill-on-bad-exit=");
    assert_string_equal(operand_of(SLURM_SRUN, "srun -W 30 --wait 20 job"), "job");
    assert_string_equal(seen, "wait=30 wait=20");
}

static void the_last_component_has_the_command(void **state)
{
    (void)state;
    assert_string_equal(operand_of(SLURM_SALLOC, "salloc -N1 job"), "job");
    assert_string_equal(operand_of(SLURM_SALLOC, "salloc -N1 : -N2 : -w n1 job :"), "job");
    assert_string_equal(operand_of(SLURM_SALLOC, "salloc -N1 :"), "-");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_operand_is_found),
        cmocka_unit_test(srun_has_letters_of_its_own),
        cmocka_unit_test(the_last_component_has_the_command),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
