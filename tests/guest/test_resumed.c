/* SPDX-License-Identifier: Apache-2.0 */
/* A resumed script's commands name the job that runs now, unless the script has set a variable. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "resumed.h"

static const char template[] = "/tmp/vhpc-resumed-XXXXXX";
static char folder[sizeof template];
static char path[64];

static int make_folder(void **state)
{
    (void)state;
    memcpy(folder, template, sizeof folder);
    if (mkdtemp(folder) == NULL)
        return -1;
    (void)snprintf(path, sizeof path, "%s/file", folder);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    (void)unlink(path);
    return rmdir(folder);
}

static void write_pair(const char *const *first, const char *const *now)
{
    struct execspec one = {0}, two = {0};
    for (; *first != NULL; first++)
        assert_int_equal(execspec_add_env(&one, *first), 0);
    for (; *now != NULL; now++)
        assert_int_equal(execspec_add_env(&two, *now), 0);
    assert_int_equal(resumed_write(path, &one, &two), 0);
    execspec_free(&one);
    execspec_free(&two);
}

static void test_values_of_the_first_job_are_replaced(void **state)
{
    (void)state;
    write_pair((const char *[]){"SLURM_JOB_ID=10", "SLURM_JOB_NAME=a\nb", "SLURM_NNODES=2",
                                "VHPC_JOB_GENERATION=10.0.aa", "HOME=/home/a", "SLURM_GONE=1",
                                NULL},
               (const char *[]){"HOME=/home/b", "SLURM_JOB_ID=12", "SLURM_JOB_NAME=c=d",
                                "SLURM_NNODES=2", "VHPC_JOB_GENERATION=12.0.bb", NULL});
    (void)setenv("SLURM_JOB_ID", "10", 1);
    (void)setenv("SLURM_JOB_NAME", "a\nb", 1);
    (void)setenv("VHPC_JOB_GENERATION", "10.0.aa", 1);
    (void)setenv("HOME", "/home/a", 1);
    (void)setenv("SLURM_GONE", "1", 1);
    resumed_apply(path);
    assert_string_equal(getenv("SLURM_JOB_ID"), "12");
    assert_string_equal(getenv("SLURM_JOB_NAME"), "c=d");
    assert_string_equal(getenv("VHPC_JOB_GENERATION"), "12.0.bb");
    assert_string_equal(getenv("HOME"), "/home/a");
    assert_string_equal(getenv("SLURM_GONE"), "1");
}

static void test_a_value_of_the_script_stays(void **state)
{
    (void)state;
    write_pair((const char *[]){"SLURM_JOB_ID=10", "SLURM_NTASKS=4", NULL},
               (const char *[]){"SLURM_JOB_ID=12", "SLURM_NTASKS=8", NULL});
    (void)setenv("SLURM_JOB_ID", "77", 1);
    (void)unsetenv("SLURM_NTASKS");
    resumed_apply(path);
    assert_string_equal(getenv("SLURM_JOB_ID"), "77");
    assert_null(getenv("SLURM_NTASKS"));
}

/* A third job, with the first one's id again: nothing differs any more. */
static void test_equal_jobs_need_no_file(void **state)
{
    (void)state;
    write_pair((const char *[]){"SLURM_JOB_ID=10", NULL},
               (const char *[]){"SLURM_JOB_ID=12", NULL});
    assert_int_equal(access(path, R_OK), 0);
    write_pair((const char *[]){"SLURM_JOB_ID=10", NULL},
               (const char *[]){"SLURM_JOB_ID=10", NULL});
    assert_int_equal(access(path, F_OK), -1);
    (void)setenv("SLURM_JOB_ID", "10", 1);
    resumed_apply(path);
    assert_string_equal(getenv("SLURM_JOB_ID"), "10");
}

/* Slurm sets the count in the runs after the first one, and vhpc's plugin refuses that of another
 * run. */
static void test_the_count_of_restarts_is_that_of_the_run(void **state)
{
    (void)state;
    write_pair((const char *[]){"SLURM_RESTART_COUNT=2", NULL},
               (const char *[]){"SLURM_JOB_ID=12", NULL});
    (void)setenv("SLURM_RESTART_COUNT", "2", 1);
    resumed_apply(path);
    assert_string_equal(getenv("SLURM_RESTART_COUNT"), "0");
}

static void test_steps_name_the_count_of_each_run(void **state)
{
    static const char *const counts[] = {"SLURM_RESTART_COUNT=1", NULL, "SLURM_RESTART_COUNT=1",
                                         "SLURM_RESTART_COUNT=2", NULL};
    struct execspec step = {0}, before = {0};
    (void)state;
    assert_int_equal(execspec_add_env(&step, counts[0]), 0);
    assert_int_equal(execspec_add_env(&before, counts[0]), 0);
    for (size_t i = 1; i < sizeof counts / sizeof counts[0]; i++) {
        struct execspec now = {0};
        if (counts[i] != NULL)
            assert_int_equal(execspec_add_env(&now, counts[i]), 0);
        assert_int_equal(resumed_replace(&step, &before, &now), 0);
        assert_string_equal(step.envp[0], counts[i] != NULL ? counts[i] : "SLURM_RESTART_COUNT=0");
        execspec_free(&before);
        before = now;
    }
    execspec_free(&before);
    execspec_free(&step);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_values_of_the_first_job_are_replaced, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(test_a_value_of_the_script_stays, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(test_equal_jobs_need_no_file, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(test_the_count_of_restarts_is_that_of_the_run, make_folder,
                                        remove_folder),
        cmocka_unit_test(test_steps_name_the_count_of_each_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
