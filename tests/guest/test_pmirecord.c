/* SPDX-License-Identifier: Apache-2.0 */
/* promise: checkpoint.pmi */
/*
 * Requests of MPICH 4 to mpi/pmi2 by PMI-1 and PMI-2, in pieces of every size: those that are kept
 * for the server of the next step, and the reasons to wait.
 */
#include <string.h>

#include "check.h"
#include "pmirecord.h"

#define INIT_1 "cmd=init pmi_version=1 pmi_subversion=1\n"
#define DONE_1 "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1\n"
#define INIT_2 "cmd=init pmi_version=2 pmi_subversion=0\n"
#define DONE_2 "cmd=response_to_init rc=0 pmi_version=2 pmi_subversion=0\n"
#define PUT_1(key) "cmd=put kvsname=42.1 key=" key " value=x\n"
#define PUT_2 "    30cmd=kvs-put;key=card0;value=x;"
#define FULL_2 "    56cmd=fullinit;pmijobid=42.1;pmirank=0;threaded=FALSE;x=y;"
#define FENCE_2 "14    cmd=kvs-fence;"

struct turn {
    const char *program, *server;
};

/* The turns, in pieces; then what is kept, and the obstacle. */
static void keeps(const struct turn *turns, const char *kept, const char *obstacle)
{
    for (size_t piece = 1; piece <= 64; piece++) {
        struct pmirecord r = {0};
        for (const struct turn *t = turns; t->program != NULL; t++) {
            size_t said = strlen(t->program), got = strlen(t->server);
            for (size_t at = 0; at < said; at += piece)
                pmirecord_program(&r, (const uint8_t *)t->program + at,
                                  said - at < piece ? said - at : piece);
            for (size_t at = 0; at < got; at += piece)
                pmirecord_server(&r, (const uint8_t *)t->server + at,
                                 got - at < piece ? got - at : piece);
        }
        assert_int_equal(r.kept.len, strlen(kept));
        if (r.kept.len > 0)
            assert_memory_equal(buf_head(&r.kept), kept, r.kept.len);
        if (obstacle != NULL)
            assert_string_equal(pmirecord_obstacle(&r), obstacle);
        else
            assert_null(pmirecord_obstacle(&r));
        pmirecord_free(&r);
    }
}

static void values_and_the_last_fence_are_kept(void **state)
{
    (void)state;
    const struct turn one[] = {{INIT_1, DONE_1},
                               {"cmd=get_maxes\n", "cmd=maxes rc=0 kvsname_max=64\n"},
                               {PUT_1("a"), "cmd=put_result rc=0\n"},
                               {"cmd=barrier_in\n", "cmd=barrier_out rc=0\n"},
                               {"cmd=get kvsname=42.1 key=b\n", "cmd=get_result rc=0 value=y\n"},
                               {PUT_1("c"), "cmd=put_result rc=0\n"},
                               {"cmd=barrier_in\n", "cmd=barrier_out rc=0\n"},
                               {PUT_1("d"), "cmd=put_result rc=0\n"},
                               {0}};
    keeps(one, INIT_1 PUT_1("a") PUT_1("c") "cmd=barrier_in\n" PUT_1("d"), NULL);
    const struct turn two[] = {{INIT_2, DONE_2},
                               {FULL_2, "34    cmd=fullinit-response;rc=0;rank=0;"},
                               {FENCE_2, "28    cmd=kvs-fence-response;rc=0;"},
                               {PUT_2, "26    cmd=kvs-put-response;rc=0;"},
                               {FENCE_2, "28    cmd=kvs-fence-response;rc=0;"},
                               {"    13cmd=finalize;", "27    cmd=finalize-response;rc=0;"},
                               {0}};
    keeps(two, INIT_2 FULL_2 PUT_2 FENCE_2 "    13cmd=finalize;", NULL);
    const struct turn none[] = {{0}};
    keeps(none, "", NULL);
}

static void a_request_without_its_answer_delays(void **state)
{
    (void)state;
    const char *waits = "waits for an answer of its PMI server";
    const struct turn asked[] = {{INIT_1, DONE_1}, {"cmd=barrier_in\n", ""}, {0}};
    keeps(asked, INIT_1 "cmd=barrier_in\n", waits);
    const struct turn half[] = {{INIT_1, DONE_1}, {"cmd=get_maxes", ""}, {0}};
    keeps(half, INIT_1, waits);
    const struct turn answer[] = {{INIT_2, DONE_2}, {FENCE_2, "28    cmd=kvs-fence"}, {0}};
    keeps(answer, INIT_2 FENCE_2, waits);
}

static void what_cannot_be_repeated_is_found(void **state)
{
    (void)state;
    const struct turn name[] = {{INIT_1, DONE_1}, {"cmd=publish_name service=a port=b\n", ""}, {0}};
    keeps(name, "", "has published a name, or connects to another MPI program");
    const struct turn version[] = {{INIT_2, DONE_1}, {0}};
    keeps(version, "", "and its PMI server have different versions");
    const struct turn junk[] = {{INIT_2, DONE_2}, {"this is no message", ""}, {0}};
    keeps(junk, "", "uses PMI in a way that a checkpoint does not know");
    const struct turn refused[] = {
        {INIT_1, "cmd=response_to_init rc=1 pmi_version=1 pmi_subversion=1\n"}, {0}};
    keeps(refused, "", "and its PMI server have different versions");
}

static void only_so_much_is_kept(void **state)
{
    (void)state;
    struct pmirecord r = {0};
    char value[1024] = {0};
    pmirecord_program(&r, (const uint8_t *)INIT_1, strlen(INIT_1));
    pmirecord_server(&r, (const uint8_t *)DONE_1, strlen(DONE_1));
    memset(value, 'v', sizeof value - 1);
    for (int i = 0; i < 100; i++) {
        static const char begin[] = "cmd=put kvsname=42.1 key=a value=";
        pmirecord_program(&r, (const uint8_t *)begin, sizeof begin - 1);
        pmirecord_program(&r, (const uint8_t *)value, sizeof value - 1);
        pmirecord_program(&r, (const uint8_t *)"\n", 1);
        assert_true(r.kept.len <= PMIRECORD_MAX);
    }
    assert_string_equal(pmirecord_obstacle(&r),
                        "has told its PMI server more than a checkpoint keeps");
    pmirecord_free(&r);
    /* A message that does not end is not collected without a limit. */
    for (int i = 0; i < 100; i++) {
        pmirecord_program(&r, (const uint8_t *)value, sizeof value - 1);
        assert_true(r.program.part.len <= PMIRECORD_MESSAGE_MAX + sizeof value);
    }
    assert_non_null(pmirecord_obstacle(&r));
    pmirecord_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_and_the_last_fence_are_kept),
        cmocka_unit_test(a_request_without_its_answer_delays),
        cmocka_unit_test(what_cannot_be_repeated_is_found),
        cmocka_unit_test(only_so_much_is_kept),
    };
    return cmocka_run_group_tests_name("pmirecord", tests, NULL, NULL);
}
