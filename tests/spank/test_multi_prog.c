/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "multi_prog.h"

/* The example of srun(1), "MULTIPLE PROGRAM CONFIGURATION". */
static void the_example_of_the_srun_manual_is_recognised(void **unused)
{
    (void)unused;
    assert_true(vhpc_argv_is_multi_prog("# srun multiple program configuration file\n"
                                        "#\n"
                                        "# srun -n8 -l --multi-prog silly.conf\n"
                                        "4-6       hostname\n"
                                        "1,7       echo  task:%t\n"
                                        "0,2-3     echo  offset:%o\n"));
}

static void a_star_and_continued_lines_are_recognised(void **unused)
{
    (void)unused;
    assert_true(vhpc_argv_is_multi_prog("* ./a.out"));
    assert_true(vhpc_argv_is_multi_prog("0 sh -c \\\n  'true'\n1 date\n"));
}

static void ordinary_arguments_are_not(void **unused)
{
    static const char *const ordinary[] = {
        "",
        "\n",
        "# only a comment\n",
        "-c",
        "17",
        "1,2",
        "x 1",
        "echo hello\n0 date\n",
        "0\tdate\nend\n",
    };

    (void)unused;
    for (size_t i = 0; i < sizeof ordinary / sizeof ordinary[0]; i++)
        assert_false(vhpc_argv_is_multi_prog(ordinary[i]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_example_of_the_srun_manual_is_recognised),
        cmocka_unit_test(a_star_and_continued_lines_are_recognised),
        cmocka_unit_test(ordinary_arguments_are_not),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
