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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_values_of_the_first_job_are_replaced, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(test_a_value_of_the_script_stays, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(test_equal_jobs_need_no_file, make_folder, remove_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
