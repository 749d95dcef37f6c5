/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "args.h"

static void absent_arguments_have_the_packaged_paths(void **unused)
{
    struct vhpc_args args;

    (void)unused;
    assert_true(vhpc_args_read(&args, 0, NULL));
    assert_string_equal(args.run_dir, "/run/vhpc");
    assert_string_equal(args.libexec, "/usr/libexec/vhpc");
}

static void arguments_are_taken(void **unused)
{
    char *words[] = {"libexec=/opt/vhpc/libexec", "run_dir=/run/test"};
    struct vhpc_args args;

    (void)unused;
    assert_true(vhpc_args_read(&args, 2, words));
    assert_string_equal(args.run_dir, "/run/test");
    assert_string_equal(args.libexec, "/opt/vhpc/libexec");
    assert_string_equal(args.wrong, "");
}

static void an_unknown_argument_is_an_error_that_names_it(void **unused)
{
    char *words[] = {"rundir=/run/test", "libexec=/opt/x"};
    struct vhpc_args args;

    (void)unused;
    assert_false(vhpc_args_read(&args, 2, words));
    assert_non_null(strstr(args.wrong, "rundir=/run/test"));
    assert_string_equal(args.libexec, "/opt/x"); /* the others still count */
    assert_string_equal(args.run_dir, "/run/vhpc");
}

static void a_directory_must_be_absolute_and_bounded(void **unused)
{
    char longest[VHPC_DIR_SIZE + 16] = "run_dir=/";
    char *bad[] = {"run_dir",         "run_dir=",        "run_dir=run", "run_dir=/",
                   "run_dir=/a/../b", "run_dir=/a\nb=c", longest};
    struct vhpc_args args;

    (void)unused;
    memset(longest + 9, 'a', VHPC_DIR_SIZE - 1);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_false(vhpc_args_read(&args, 1, &bad[i]));
        assert_string_equal(args.run_dir, "/run/vhpc");
        assert_null(strchr(args.wrong, '\n'));
    }
    longest[strlen("run_dir=") + VHPC_DIR_SIZE - 1] = '\0';
    assert_true(vhpc_args_read(&args, 1, &bad[6]));
    assert_int_equal(strlen(args.run_dir), 255);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(absent_arguments_have_the_packaged_paths),
        cmocka_unit_test(arguments_are_taken),
        cmocka_unit_test(an_unknown_argument_is_an_error_that_names_it),
        cmocka_unit_test(a_directory_must_be_absolute_and_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
