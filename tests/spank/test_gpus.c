/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers of GPUs: from the node's numbers to indexes in the guest. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "gpus.h"

static char out[VHPC_GPUS_SIZE];

static void becomes(const char *gpus, const char *list, const char *expected)
{
    assert_true(vhpc_gpus_renumber(gpus, list, out, sizeof out));
    assert_string_equal(out, expected);
}

static void a_list_counts_the_guests_gpus(void **unused)
{
    (void)unused;
    becomes("2:5", "2,5", "0,1");
    becomes("2:5", "5", "1");
    becomes("2:5", "5,2", "1,0");
    becomes("0", "0", "0");
    becomes("10:1", "1,10", "1,0");
}

static void what_the_guest_lacks_is_left_alone(void **unused)
{
    static const char *const lists[] = {"",
                                        "3",
                                        "2,3",
                                        "all",
                                        "2;5",
                                        ",2",
                                        "2,,5",
                                        "-1",
                                        "GPU-8b1f2c",
                                        "0x2",
                                        "99999999999999999999"};

    (void)unused;
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        assert_false(vhpc_gpus_renumber("2:5", lists[i], out, sizeof out));
    assert_false(vhpc_gpus_renumber("", "0", out, sizeof out));
}

static void a_list_that_does_not_fit_is_left_alone(void **unused)
{
    char two[4];

    (void)unused;
    assert_true(vhpc_gpus_renumber("2:5", "2,5", two, sizeof two));
    assert_string_equal(two, "0,1");
    assert_false(vhpc_gpus_renumber("2:5", "2,5", two, 3));
}

static void what_counts_as_the_guest_does_stays(void **unused)
{
    (void)unused;
    /* by the node's numbers */
    assert_true(vhpc_gpus_renumber_visible("2:5", "2,5", "2,5", out, sizeof out));
    assert_string_equal(out, "0,1");
    assert_true(vhpc_gpus_renumber_visible("2:5", "2,5", "5", out, sizeof out));
    assert_string_equal(out, "1");
    /* as with ConstrainDevices */
    assert_false(vhpc_gpus_renumber_visible("2:5", "2,5", "0,1", out, sizeof out));
    assert_false(vhpc_gpus_renumber_visible("1:2", "1,2", "0,1", out, sizeof out));
    assert_false(vhpc_gpus_renumber_visible("1:2", "1,2", "1", out, sizeof out));
    /* Slurm's own list has the node's numbers, even if they could be indexes */
    assert_true(vhpc_gpus_renumber_visible("1:2", "1", "1", out, sizeof out));
    assert_string_equal(out, "0");
    assert_false(vhpc_gpus_renumber_visible("2:5", "2,5", "GPU-8b1f2c", out, sizeof out));
}

/* With ConstrainDevices a step sees its own GPUs only, and counts them from 0; the guest has all of
 * the job's. */
static void a_step_with_some_of_the_gpus_sees_these(void **unused)
{
    (void)unused;
    assert_true(vhpc_gpus_renumber_visible("2:5", "5", "0", out, sizeof out));
    assert_string_equal(out, "1");
    assert_true(vhpc_gpus_renumber_visible("2:5:7:9", "5,9", "0,1", out, sizeof out));
    assert_string_equal(out, "1,3");
    assert_true(vhpc_gpus_renumber_visible("0:1:2", "2", "0", out, sizeof out));
    assert_string_equal(out, "2");
    /* the same again, inherited by a step of the step */
    assert_false(vhpc_gpus_renumber_visible("2:5", "5", "1", out, sizeof out));
    assert_false(vhpc_gpus_renumber_visible("2:5:7:9", "5,9", "1,3", out, sizeof out));
    /* the first GPUs of the guest */
    assert_false(vhpc_gpus_renumber_visible("2:5", "2", "0", out, sizeof out));
    /* in the user's order, or not a list */
    assert_false(vhpc_gpus_renumber_visible("2:5", "2,5", "1,0", out, sizeof out));
    assert_true(vhpc_gpus_renumber_visible("2:5:7", "5,7", "1,0", out, sizeof out));
    assert_string_equal(out, "2,1");
    assert_false(vhpc_gpus_renumber_visible("2:5", "5", "0,all", out, sizeof out));
    /* by the node's numbers */
    assert_true(vhpc_gpus_renumber_visible("2:5", "5", "5", out, sizeof out));
    assert_string_equal(out, "1");
    assert_false(vhpc_gpus_renumber_visible("2:5", "", "0", out, sizeof out));
}

static void shares(const char *gpus, const char *host, const char *list, bool visible,
                   const char *expected)
{
    assert_true(vhpc_gpus_share(gpus, host, list, visible, out, sizeof out));
    assert_string_equal(out, expected);
}

static void one_of_several_guests_sees_its_own(void **unused)
{
    (void)unused;
    shares("2:5", "2,3,5,7", "2,3,5,7", false, "0,1");
    shares("3:7", "2,3,5,7", "2,3,5,7", false, "0,1");
    shares("3:7", "2,3,5,7", "7,2", false, "1");
    shares("3:7", "2,3,5,7", "2,5", false, "");
    shares("", "2,3,5,7", "2,3,5,7", false, "");
    /* of the whole job, in a step with fewer GPUs */
    shares("3:7", "2,3", "2,3,5,7", false, "0,1");
    /* with ConstrainDevices: the second and the fourth of the job's */
    shares("3:7", "2,3,5,7", "0,1,2,3", true, "0,1");
    shares("3:7", "2,3,5,7", "3", true, "1");
    shares("2:5", "2,3,5,7", "3", true, "");
    /* by the node's numbers */
    shares("3:7", "2,3,5,7", "2,3,5,7", true, "0,1");
    shares("3:7", "2,3,5,7", "7", true, "1");
    shares("3:7", "", "7,3", true, "1,0");
    assert_false(vhpc_gpus_share("3:7", "2,3,5,7", "GPU-8b1f2c", true, out, sizeof out));
    assert_false(vhpc_gpus_share("3:7", "2,3,5,7", "3,all", false, out, sizeof out));
    assert_false(vhpc_gpus_share("3:7", "2,3,5,7", "", false, out, sizeof out));
    assert_false(vhpc_gpus_share("3:7", "2,3,5,7", "3,7", false, out, 3));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_list_counts_the_guests_gpus),
        cmocka_unit_test(a_step_with_some_of_the_gpus_sees_these),
        cmocka_unit_test(what_the_guest_lacks_is_left_alone),
        cmocka_unit_test(a_list_that_does_not_fit_is_left_alone),
        cmocka_unit_test(what_counts_as_the_guest_does_stays),
        cmocka_unit_test(one_of_several_guests_sees_its_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
