/* SPDX-License-Identifier: Apache-2.0 */
/* Which variables --export names, by Slurm's manual of srun and sbatch. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "exported.h"

static const char *listed(const char *value)
{
    assert_true(vhpc_exported_set(value));
    return getenv("SLURM_VHPC_EXPORTED");
}

/* promise: image.export */
static void names_of_a_value_are_listed(void **unused)
{
    (void)unused;
    assert_string_equal(listed("ALL,RETRY=2000"), "RETRY");
    assert_string_equal(listed("RETRY=2000,OTHER,A=b=c"), "RETRY,OTHER,A");
    assert_string_equal(listed("A='x,B=1',C=\"y,D=2\",'E=1,F',G"), "A,C,E,G");
    assert_string_equal(listed(",,ALLES=1,=x,NONE_2,"), "ALLES,NONE_2");
    assert_string_equal(listed("A='open,B=1"), "A");
    assert_null(listed("ALL"));
    assert_string_equal(listed("X"), "X");
    assert_null(listed(NULL));
    assert_null(listed("none"));
    assert_null(listed("NIL"));
    assert_null(listed(""));
}

static struct vhpc_srun_words read_words(char *const *argv)
{
    int argc = 0;

    while (argv[argc] != NULL)
        argc++;
    return vhpc_srun_words(argc, argv);
}

/* promise: image.export */
static void sruns_own_option_is_found(void **unused)
{
    char *const last[] = {"srun",     "-n2", "--export=A=1", "--mpi", "pmi2",       "-N", "1",
                          "--export", "B=2", "--jobid=7",    "prog",  "--export=C", NULL};
    char *const none[] = {"srun", "-J", "--export=A", "--", "--export=B", NULL};
    char *const nothing[] = {NULL};

    (void)unused;
    assert_string_equal(read_words(last).exported, "B=2");
    assert_true(read_words(last).is_for_job);
    assert_null(read_words(none).exported);
    assert_false(read_words(none).is_for_job);
    assert_null(read_words(nothing).exported);
}

/* As sbatch sets it: without overwriting. promise: image.export */
static void sbatchs_value_is_told_from_that_of_the_shell(void **unused)
{
    static const char variable[] = "SLURM_EXPORT_ENV";

    (void)unused;
    (void)unsetenv(variable);
    vhpc_sbatch_hide_export();
    assert_null(vhpc_sbatch_export());
    assert_int_equal(setenv(variable, "ALL,OLD=1", 1), 0);
    vhpc_sbatch_hide_export();
    assert_null(getenv(variable));
    assert_int_equal(setenv(variable, "ALL,NEW=1", 0), 0);
    assert_string_equal(vhpc_sbatch_export(), "ALL,NEW=1");
    assert_string_equal(getenv(variable), "ALL,OLD=1");
    vhpc_sbatch_hide_export();
    assert_null(vhpc_sbatch_export());
    assert_string_equal(getenv(variable), "ALL,OLD=1");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_of_a_value_are_listed),
        cmocka_unit_test(sruns_own_option_is_found),
        cmocka_unit_test(sbatchs_value_is_told_from_that_of_the_shell),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
