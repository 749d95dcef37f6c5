/* SPDX-License-Identifier: Apache-2.0 */
/* Which sruns can be issued again, and the mark that connects them with their tasks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "mark.h"
#include "repeatable.h"

static const struct step_mark made = {
    .guest = 0xfedcba9876543210, .session = 7, .call = 4294967295, .hold = 12, .take_over = true};

static struct step_mark taken(const char *variable, const char *rank)
{
    struct execspec spec = {0};
    char text[128];
    assert_int_equal(execspec_add_env(&spec, variable), 0);
    (void)snprintf(text, sizeof text, "SLURM_PROCID=%s", rank);
    assert_int_equal(execspec_add_env(&spec, text), 0);
    struct step_mark mark = step_mark_take(&spec);
    assert_int_equal(spec.envc, 1); /* programs do not see it */
    execspec_free(&spec);
    return mark;
}

static void a_mark_reaches_the_task(void **state)
{
    struct execspec spec = {0};
    (void)state;
    assert_int_equal(execspec_add_env(&spec, VHPC_CALL_VARIABLE "="), 0);
    assert_int_equal(step_mark_put(&spec, &made), 0);
    assert_int_equal(spec.envc, 1);
    assert_string_equal(spec.envp[0], "SLURM_VHPC_CALL=fedcba9876543210.7.4294967295.12.1");
    struct step_mark mark = taken(spec.envp[0], "31");
    execspec_free(&spec);
    assert_true(step_mark_same_srun(&mark, &made));
    assert_true(mark.hold == 12 && mark.take_over && mark.task == 31);
    assert_false(step_mark_same_task(&mark, &made));
}

static void other_texts_are_no_marks(void **state)
{
    static const char *const texts[] = {
        "",           "1",          "1.2.3.4",  "1.2.3.4.2",          "0.2.3.4.1", "x.2.3.4.1",
        "1.2.3.4.1x", "1.2.3.4.-1", "1.2.3..1", "1.4294967296.3.4.1", "1 2 3 4 1"};
    char variable[128];
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        (void)snprintf(variable, sizeof variable, VHPC_CALL_VARIABLE "=%s", texts[i]);
        assert_true(taken(variable, "0").guest == 0);
    }
    assert_true(taken(VHPC_CALL_VARIABLE "=1.2.3.4.1", "").guest == 0);
    assert_true(taken(VHPC_CALL_VARIABLE "=1.2.3.4.1", "0").guest == 1);
}

static void the_newest_tasks_are_known(void **state)
{
    struct step_tasks tasks = {0};
    struct step_mark mark = made;
    (void)state;
    for (mark.task = 0; mark.task < 20000; mark.task++)
        assert_int_equal(step_tasks_add(&tasks, &mark), 0);
    mark.task = 19999;
    assert_non_null(step_tasks_find(&tasks, &mark));
    mark.task = 20000 - 16384;
    assert_non_null(step_tasks_find(&tasks, &mark));
    mark.task = 20000;
    assert_null(step_tasks_find(&tasks, &mark));
    free(tasks.entry);
}

/* Options as "NAME=VALUE". */
static bool is_repeatable(const char *nodes, const char *guests, const char *first,
                          const char *second)
{
    const char *const options[] = {first, second};
    struct repeatable r = {0};
    (void)setenv("SLURM_JOB_NUM_NODES", nodes, 1);
    (void)setenv("SLURM_NNODES", nodes, 1);
    (void)setenv("SLURM_NTASKS", "8", 1);
    (void)setenv("SLURM_NPROCS", "8", 1);
    if (guests != NULL)
        (void)setenv("VHPC_JOB_GUESTS", guests, 1);
    else
        (void)unsetenv("VHPC_JOB_GUESTS");
    for (size_t i = 0; i < 2; i++) {
        char name[64];
        size_t len = strcspn(options[i], "=");
        (void)snprintf(name, sizeof name, "%.*s", (int)len, options[i]);
        if (len > 0)
            repeatable_see(&r, name, options[i][len] == '=' ? options[i] + len + 1 : "");
    }
    return repeatable_is(&r);
}

static void steps_of_the_whole_job_are_repeatable(void **state)
{
    (void)state;
    assert_true(is_repeatable("4", NULL, "", ""));
    assert_true(is_repeatable("4", NULL, "nodes=4", "ntasks=8"));
    assert_true(is_repeatable("4", NULL, "mpi=none", "output=x"));
    assert_true(is_repeatable("4", NULL, "open-mode=append", "label"));
    assert_false(is_repeatable("4", NULL, "nodes=2", ""));
    assert_true(is_repeatable("4", NULL, "ntasks=4", "input=none")); /* one task on each node */
    assert_true(is_repeatable("4", NULL, "ntasks=4", "external-launcher"));
    assert_false(is_repeatable("4", NULL, "ntasks=5", ""));
    assert_false(is_repeatable("4", NULL, "input=all", ""));
    assert_false(is_repeatable("4", NULL, "exact", ""));
    assert_false(is_repeatable("4", NULL, "cpus-per-task=2", ""));
    assert_false(is_repeatable("4", NULL, "unknown", ""));
    assert_false(is_repeatable("4", NULL, "open-mode=truncate", ""));
    (void)setenv("SLURM_HOSTFILE", "hosts", 1);
    assert_false(is_repeatable("4", NULL, "", ""));
    (void)unsetenv("SLURM_HOSTFILE");
}

static void all_nodes_of_the_job_may_be_named(void **state)
{
    (void)state;
    (void)setenv("SLURM_JOB_NODELIST", "n[1-4]", 1);
    (void)setenv("VHPC_NODELIST", "n1,n2,n3,n4", 1);
    assert_true(is_repeatable("4", NULL, "nodelist=n[1-4]", "nodes=4"));
    assert_true(is_repeatable("4", NULL, "nodelist=n1,n2,n3,n4", ""));
    assert_false(is_repeatable("4", NULL, "nodelist=n1,n2,n3", ""));
    assert_false(is_repeatable("4", NULL, "nodelist=", ""));
    assert_false(is_repeatable("4", NULL, "nodelist=4", ""));
    assert_false(is_repeatable("4", NULL, "nodelist=1,n2,n3,n4", ""));
    assert_false(is_repeatable("4", NULL, "nodelist=n1,n2,n4,n3", ""));
    assert_false(is_repeatable("4", NULL, "nodelist=n[1-4]", "nodelist=n1"));
    assert_false(is_repeatable("4", NULL, "nodelist=n1", "nodelist=n[1-4]"));
    (void)unsetenv("SLURM_JOB_NODELIST");
    (void)unsetenv("VHPC_NODELIST");
}

/* Of mpirun: one task on each node but the first ones. */
static bool is_part(const char *nodelist, const char *nodes, const char *tasks, size_t *before)
{
    struct repeatable r = {0};
    repeatable_see(&r, "ntasks-per-node", "1");
    repeatable_see(&r, "nodes", nodes);
    repeatable_see(&r, "nodelist", nodelist);
    repeatable_see(&r, "ntasks", tasks);
    *before = r.before;
    return repeatable_is(&r);
}

static void nodes_at_the_end_of_the_job_may_be_named(void **state)
{
    size_t before = 0;
    (void)state;
    assert_true(is_repeatable("4", NULL, "", ""));
    (void)setenv("VHPC_NODELIST", "n1,n2,n13,n4", 1);
    assert_true(is_part("n2,n13,n4", "3", "3", &before) && before == 1);
    assert_true(is_part("n4", "1", "1", &before) && before == 3);
    assert_true(is_part("n1,n2,n13,n4", "4", "4", &before) && before == 0);
    assert_false(is_part("n2,n13,n4", "3", "4", &before));
    assert_false(is_part("n2,n13,n4", "2", "3", &before));
    assert_false(is_part("n2,n13", "2", "2", &before)); /* Slurm prefers idle nodes */
    assert_false(is_part("n3,n4", "2", "2", &before));
    assert_false(is_part("n0,n1,n2,n13,n4", "5", "5", &before));
    assert_false(is_repeatable("4", NULL, "ntasks-per-node=1", ""));
    assert_false(is_repeatable("4", NULL, "ntasks-per-node=2", ""));
    (void)unsetenv("VHPC_NODELIST");
}

static void the_words_of_nodelist_are_known(void **state)
{
    char *const words[] = {"srun",          "--nodelist", "n1",    "-w", "n2",
                           "--nodelist=n3", "-wn4",       "-lwn5", NULL};
    static const struct {
        int word, skipped, found;
    } of[] = {{2, 0, 2}, {4, 0, 2}, {5, 11, 1}, {6, 2, 1}, {7, 3, 0}};
    (void)state;
    for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
        struct repeatable r = {.nodelist = words[of[i].word] + of[i].skipped};
        for (int word = 0; words[word] != NULL; word++) {
            bool begins = word == of[i].word - (of[i].found == 2 ? 1 : 0);
            assert_int_equal(repeatable_nodelist(&r, words + word), begins ? of[i].found : 0);
        }
    }
    assert_int_equal(repeatable_nodelist(&(struct repeatable){0}, words), 0);
}

static void all_steps_of_a_job_of_one_guest_are_repeatable(void **state)
{
    (void)state;
    assert_true(is_repeatable("1", NULL, "exact", "ntasks=1"));
    assert_true(is_repeatable("1", "1", "exact", "ntasks=1"));
    assert_false(is_repeatable("1", "2", "exact", "ntasks=1"));
    assert_false(is_repeatable("1", NULL, "pty", ""));
    assert_false(is_repeatable("1", NULL, "nodelist=n1", ""));
    assert_false(is_repeatable("1", NULL, "wait=5", ""));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_mark_reaches_the_task),
        cmocka_unit_test(other_texts_are_no_marks),
        cmocka_unit_test(the_newest_tasks_are_known),
        cmocka_unit_test(steps_of_the_whole_job_are_repeatable),
        cmocka_unit_test(all_nodes_of_the_job_may_be_named),
        cmocka_unit_test(nodes_at_the_end_of_the_job_may_be_named),
        cmocka_unit_test(the_words_of_nodelist_are_known),
        cmocka_unit_test(all_steps_of_a_job_of_one_guest_are_repeatable),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
