/* SPDX-License-Identifier: Apache-2.0 */
/* The environment of an image: which lines are taken, and whose value a program gets. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "imageenv.h"

static int parsed(struct image_env *e, const char *text)
{
    *e = (struct image_env){0};
    return image_env_add_lines(e, text, strlen(text));
}

/* An import's list: names and values are as execve takes them. */
static void entries_of_a_list_become_variables(void **state)
{
    static const char list[] = "PATH=/opt/bin\0my.conf-dir=/etc/x\0002FAST=1\0"
                               "BASH_FUNC_module%%=() {  eval\n}\0SLURM_JOB_ID=9\0#=x\0LAST=";
    static const char *const wanted[] = {"PATH=/opt/bin", "my.conf-dir=/etc/x",
                                         "2FAST=1",       "BASH_FUNC_module%%=() {  eval\n}",
                                         "#=x",           "LAST="};
    struct image_env e = {0};
    (void)state;
    assert_int_equal(image_env_add_list(&e, list, sizeof list), 0);
    assert_int_equal(e.count, sizeof wanted / sizeof *wanted);
    for (size_t i = 0; i < e.count; i++)
        assert_string_equal(e.entries[i], wanted[i]);
    /* a bad file changes nothing, and lines win over the list */
    char mark[sizeof e.mark];
    memcpy(mark, e.mark, sizeof mark);
    assert_int_equal(image_env_add_list(&e, "A=1\0B", 5), -EINVAL);
    assert_int_equal(image_env_add_list(&e, "A=1\0=x", 6), -EINVAL);
    assert_int_equal(e.count, sizeof wanted / sizeof *wanted);
    assert_string_equal(e.mark, mark);
    assert_int_equal(image_env_add_lines(&e, "PATH=/own", 9), 0);
    assert_string_not_equal(e.mark, mark);
    struct execspec spec = {0};
    assert_int_equal(image_env_apply(&e, &spec), 0);
    assert_string_equal(execspec_getenv(&spec, "PATH"), "/own");
    assert_string_equal(execspec_getenv(&spec, "my.conf-dir"), "/etc/x");
    execspec_free(&spec);
    image_env_free(&e);
}

static void lines_become_variables(void **state)
{
    struct image_env e;
    (void)state;
    assert_int_equal(parsed(&e, "PATH=/opt/bin:/bin\n\n# NAME=no\nA_1=b = \"c\" \nEMPTY=\nLAST=x"),
                     0);
    assert_int_equal(e.count, 4);
    assert_string_equal(e.entries[0], "PATH=/opt/bin:/bin");
    assert_string_equal(e.entries[1], "A_1=b = \"c\" ");
    assert_string_equal(e.entries[2], "EMPTY=");
    assert_string_equal(e.entries[3], "LAST=x");
    image_env_free(&e);
}

static void variables_of_the_job_stay(void **state)
{
    struct image_env e;
    (void)state;
    assert_int_equal(parsed(&e,
                            "HOME=/root\nUSER=root\nLOGNAME=root\nPWD=/\nOLDPWD=/\nSLURM_JOB_ID=1\n"
                            "SLURMD_NODENAME=x\nVHPC_RANK=1\nPMI_FD=3\nPMIX_RANK=1\nHOMES=1\n"),
                     0);
    assert_int_equal(e.count, 1);
    assert_string_equal(e.entries[0], "HOMES=1");
    image_env_free(&e);
}

static void other_lines_are_refused(void **state)
{
    static const char *const bad[] = {"NAME",       "=x",        "1A=x", "A B=x",
                                      "export A=x", "A=b\n-x=1", " A=b"};
    struct image_env e;
    char many[IMAGE_ENV_ENTRIES_MAX * 4 + 4];
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(parsed(&e, bad[i]), -EINVAL);
        assert_int_equal(e.count, 0);
        image_env_free(&e);
    }
    assert_int_equal(image_env_add_lines(&e, "A=\0b", 4), -EINVAL);
    for (size_t i = 0; i < sizeof many; i++)
        many[i] = "A=b\n"[i % 4];
    assert_int_equal(image_env_add_lines(&e, many, sizeof many - 4), 0);
    image_env_free(&e);
    assert_int_equal(image_env_add_lines(&e, many, sizeof many), -EINVAL);
    image_env_free(&e);
}

static void the_image_wins_once(void **state)
{
    struct execspec spec = {0}, other = {0};
    struct image_env e, next;
    (void)state;
    assert_int_equal(parsed(&e, "PATH=/opt/bin\nTERM=vt100"), 0);
    assert_int_equal(parsed(&next, "PATH=/next"), 0);
    assert_int_equal(execspec_add_env(&spec, "PATH=/host"), 0);
    assert_int_equal(execspec_add_env(&spec, "PATHS=1"), 0);
    assert_int_equal(image_env_apply(&e, &spec), 0);
    assert_string_equal(execspec_getenv(&spec, "PATH"), "/opt/bin");
    assert_string_equal(execspec_getenv(&spec, "PATHS"), "1");
    assert_string_equal(execspec_getenv(&spec, "TERM"), "vt100");

    /* a step of a script that has changed one variable and removed the other */
    for (size_t i = 0; i < spec.envc; i++)
        if (strncmp(spec.envp[i], "PATH=", 5) != 0 && strncmp(spec.envp[i], "TERM=", 5) != 0)
            assert_int_equal(execspec_add_env(&other, spec.envp[i]), 0);
    assert_int_equal(execspec_add_env(&other, "PATH=/script"), 0);
    assert_int_equal(image_env_apply(&e, &other), 0);
    assert_string_equal(execspec_getenv(&other, "PATH"), "/script");
    assert_null(execspec_getenv(&other, "TERM"));

    /* a job of another image that the script has submitted */
    assert_int_equal(image_env_apply(&next, &other), 0);
    assert_string_equal(execspec_getenv(&other, "PATH"), "/next");
    execspec_free(&spec);
    execspec_free(&other);
    image_env_free(&e);
    image_env_free(&next);
}

static void add_all(struct execspec *spec, const char *const *entries)
{
    for (; *entries != NULL; entries++)
        assert_int_equal(execspec_add_env(spec, *entries), 0);
}

/* promise: image.export */
static void names_of_the_users_export_win(void **state)
{
    static const char *const host[] = {"RETRY=2000", "RETRY_2=leaked", "PATH=/host",
                                       "MODE=mine",  "COLOR=mine",     NULL};
    static const char of_user[] = "COLOR=of --vhpc-env";
    struct execspec spec = {0}, next = {0};
    struct image_env e;
    (void)state;
    assert_int_equal(parsed(&e, "RETRY=1\nRETRY_2=1\nPATH=/opt\nMODE=x\nUNSET=x"), 0);
    assert_int_equal(image_env_add_list(&e, of_user, sizeof of_user), 0);
    e.users = 1;
    add_all(&spec, host);
    assert_int_equal(execspec_add_env(&spec, IMAGE_ENV_EXPORTED "=COLOR,RETRY,MODE,UNSET"), 0);
    assert_int_equal(image_env_apply(&e, &spec), 0);
    assert_string_equal(execspec_getenv(&spec, "RETRY"), "2000");
    assert_string_equal(execspec_getenv(&spec, "RETRY_2"), "1");
    assert_string_equal(execspec_getenv(&spec, "PATH"), "/opt");
    assert_string_equal(execspec_getenv(&spec, "MODE"), "mine");
    assert_null(execspec_getenv(&spec, "UNSET")); /* srun --export=UNSET where it is not set */
    assert_string_equal(execspec_getenv(&spec, "COLOR"), "of --vhpc-env");
    assert_null(execspec_getenv(&spec, IMAGE_ENV_EXPORTED));

    /* without an image's environment the list goes, too */
    assert_int_equal(execspec_add_env(&next, IMAGE_ENV_EXPORTED "=A"), 0);
    assert_int_equal(image_env_apply(NULL, &next), 0);
    assert_null(execspec_getenv(&next, IMAGE_ENV_EXPORTED));
    execspec_free(&spec);
    execspec_free(&next);
    image_env_free(&e);
}

/* promise: job.env-option */
static void variables_that_the_user_keeps_stay(void **state)
{
    static const char *const host[] = {"RETRY=2", "PATH=/host", NULL};
    static char kept[] = "UNSET,RETRY,RETR";
    struct execspec spec = {0};
    struct image_env e;
    (void)state;
    assert_int_equal(parsed(&e, "RETRY=1\nUNSET=1\nPATH=/opt\nUNSET=2"), 0);
    assert_non_null(e.kept = strdup(kept));
    add_all(&spec, host);
    assert_int_equal(image_env_apply(&e, &spec), 0);
    assert_string_equal(execspec_getenv(&spec, "RETRY"), "2");
    assert_string_equal(execspec_getenv(&spec, "UNSET"), "2"); /* the image's, as it has none */
    assert_string_equal(execspec_getenv(&spec, "PATH"), "/opt");
    execspec_free(&spec);
    image_env_free(&e);
}

/* promise: image.export */
static void values_of_the_image_yield_to_sruns_option(void **state)
{
    static const char *const now[] = {"RETRY=1", "SCRIPTS=changed", "KEPT=1", "OTHER=1", NULL};
    struct execspec spec = {0};
    struct image_env e;
    (void)state;
    assert_int_equal(parsed(&e, "RETRY=1\nSCRIPTS=1\nKEPT=1\nREMOVED=1"), 0);
    add_all(&spec, now);
    image_env_yield(&e, "ALL,RETRY=2000,SCRIPTS=2000,KEPT,OTHER=2,REMOVED=3", &spec);
    assert_null(execspec_getenv(&spec, "RETRY"));
    assert_string_equal(execspec_getenv(&spec, "SCRIPTS"), "changed"); /* as Slurm does */
    assert_string_equal(execspec_getenv(&spec, "KEPT"), "1");
    assert_string_equal(execspec_getenv(&spec, "OTHER"), "1");
    execspec_free(&spec);
    image_env_free(&e);
}

static void a_file_is_read(void **state)
{
    char folder[] = "/tmp/imageenvXXXXXX", path[64];
    struct image_env e = {0};
    (void)state;
    assert_non_null(mkdtemp(folder));
    (void)snprintf(path, sizeof path, "%s/environment", folder);
    assert_int_equal(image_env_load(&e, path, image_env_add_lines), 0);
    assert_int_equal(e.count, 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(image_env_load(&e, path, image_env_add_lines), -EINVAL);
    assert_int_equal(unlink(path), 0);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_int_equal(write(fd, "A=1\nB=2\n", 8), 8);
    assert_int_equal(image_env_load(&e, path, image_env_add_lines), 0);
    assert_int_equal(e.count, 2);
    image_env_free(&e);
    assert_int_equal(ftruncate(fd, IMAGE_ENV_SIZE_MAX + 1), 0);
    assert_int_equal(image_env_load(&e, path, image_env_add_lines), -EFBIG);
    assert_int_equal(close(fd), 0);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(folder), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_become_variables),
        cmocka_unit_test(variables_of_the_job_stay),
        cmocka_unit_test(other_lines_are_refused),
        cmocka_unit_test(the_image_wins_once),
        cmocka_unit_test(names_of_the_users_export_win),
        cmocka_unit_test(variables_that_the_user_keeps_stay),
        cmocka_unit_test(values_of_the_image_yield_to_sruns_option),
        cmocka_unit_test(a_file_is_read),
        cmocka_unit_test(entries_of_a_list_become_variables),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
