/* SPDX-License-Identifier: Apache-2.0 */
/* promise: mpi.refuse */
/* Requests of a program to Slurm's PMI server, in pieces of every size. */
#include <string.h>

#include "check.h"
#include "pmiwatch.h"

#define INIT_1 "cmd=init pmi_version=1 pmi_subversion=1\n"
#define INIT_2 "cmd=init pmi_version=2 pmi_subversion=0\n"
#define FULLINIT "42    cmd=fullinit;pmijobid=42.1;pmirank=0;x=1;;"
#define FINALIZE_2 "13    cmd=finalize;"

static void finds(const char *said, enum pmiwatch_found expected)
{
    size_t len = strlen(said);
    for (size_t piece = 1; piece <= len; piece++) {
        struct pmiwatch w = {0};
        enum pmiwatch_found found = PMIWATCH_NOTHING;
        for (size_t at = 0; at < len && found == PMIWATCH_NOTHING; at += piece)
            found =
                pmiwatch_read(&w, (const uint8_t *)said + at, len - at < piece ? len - at : piece);
        assert_int_equal(found, expected);
    }
}

static void one_program_may_ask_what_it_likes(void **state)
{
    (void)state;
    finds(INIT_1 "cmd=get_maxes\ncmd=put kvsname=1 key=cmd=init value=mcmd=spawn\n"
                 "cmd=barrier_in\ncmd=finalize\n",
          PMIWATCH_NOTHING);
    finds(INIT_1
          "cmd=put kvsname=123456789012345678901234567890 key=a value=cmd=init\ncmd=finalize\n",
          PMIWATCH_NOTHING);
    finds(INIT_2 FULLINIT "37    cmd=kvs-put;key=x;value=cmd=spawn;y=;" FINALIZE_2,
          PMIWATCH_NOTHING);
    finds(INIT_2 "junk that is neither" INIT_1 INIT_1, PMIWATCH_NOTHING);
    finds("", PMIWATCH_NOTHING);
}

static void a_second_program_is_found(void **state)
{
    (void)state;
    finds(INIT_1 "cmd=finalize\n" INIT_1, PMIWATCH_SECOND_INIT);
    finds(INIT_1 INIT_1, PMIWATCH_SECOND_INIT);
    finds(INIT_2 FULLINIT FINALIZE_2 INIT_2, PMIWATCH_SECOND_INIT);
    finds(INIT_2 FULLINIT FINALIZE_2 INIT_1, PMIWATCH_SECOND_INIT);
}

static void a_spawn_is_found(void **state)
{
    (void)state;
    finds(INIT_1 "mcmd=spawn\nnprocs=1\nexecname=./x\nendcmd\n", PMIWATCH_SPAWN);
    finds(INIT_2 FULLINIT "62    cmd=spawn;thrid=1;ncmds=1;preputcount=0;subcmd=./x;maxprocs=1;",
          PMIWATCH_SPAWN);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_program_may_ask_what_it_likes),
        cmocka_unit_test(a_second_program_is_found),
        cmocka_unit_test(a_spawn_is_found),
    };
    return cmocka_run_group_tests_name("pmiwatch", tests, NULL, NULL);
}
