/* SPDX-License-Identifier: Apache-2.0 */
/* promise: checkpoint.pmi */
/*
 * A program's connection to its PMIx server, and to the server of the next step. The test is both
 * the program and the servers.
 */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "localfd.h"
#include "pmixbytes.h"
#include "pmixrelay.h"

#define OLD "slurm.pmix.1009.2"
#define NEW "slurm.pmix.1009.10"

static struct {
    struct loop loop;
    struct pmixrelay relay;
    int program, server;
    bool parked, left, failed;
} t;

static bool is_parked(const struct pmixrelay *r)
{
    (void)r;
    return t.parked;
}

static void note_change(struct pmixrelay *r)
{
    t.left = r->phase == PMIXRELAY_LEFT;
}

static void note_failure(struct pmixrelay *r)
{
    (void)r;
    t.failed = true;
}

static void turn(void)
{
    for (int i = 0; i < 8; i++)
        assert_int_equal(loop_once(&t.loop, 0), 0);
}

static int set_up(void **state)
{
    int ends[2];
    (void)state;
    memset(&t, 0, sizeof t);
    t.relay = (struct pmixrelay){
        .loop = &t.loop, .is_quiet = is_parked, .changed = note_change, .failed = note_failure};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) < 0)
        return -1;
    t.program = ends[1];
    t.server = pmixrelay_start(&t.relay, ends[0], OLD, OLD);
    return t.server < 0 ? -1 : 0;
}

static int tear_down(void **state)
{
    (void)state;
    pmixrelay_close(&t.relay);
    loop_free(&t.loop);
    (void)close(t.program);
    (void)close(t.server);
    return 0;
}

static void arrives(int from, int to, const char *sent, size_t len, const char *wanted,
                    size_t wanted_len)
{
    char got[512];
    if (len > 0)
        assert_int_equal(write(from, sent, len), len);
    turn();
    ssize_t n = read(to, got, sizeof got);
    assert_int_equal(n < 0 ? 0 : n, wanted_len);
    if (wanted_len > 0)
        assert_memory_equal(got, wanted, wanted_len);
}

#define SENDS(from, to, sent, wanted)                                                              \
    arrives(from, to, sent, sizeof(sent) - 1, wanted, sizeof(wanted) - 1)
#define ASKS(sent, wanted) SENDS(t.program, t.server, sent, wanted)
#define ANSWERS(sent, wanted) SENDS(t.server, t.program, sent, wanted)

static void begins(void)
{
    ASKS(GREETING("<", OLD), GREETING("<", OLD));
    ANSWERS(GREETED, GREETED);
    ASKS(REGISTER, REGISTER);
    ANSWERS(GOOD("\x66"), GOOD("\x66"));
    ASKS(COMMIT, COMMIT);
    ANSWERS(GOOD("\x6a"), GOOD("\x6a"));
}

/* A FINALIZE of the relay, with a tag that no program has. */
#define OWN "\xff\xff\xff\xfe"
#define LEAVES "\0\0\0\0" OWN "\0\0\0\2\0\0\0\0\2\5"
#define LEFT "\0\0\0\0" OWN "\0\0\0\2\0\0\0\0\2\0"

static void leaves(void)
{
    t.parked = true;
    assert_null(pmixrelay_obstacle(&t.relay));
    assert_false(pmixrelay_leave(&t.relay));
    SENDS(-1, t.server, "", LEAVES);
    assert_false(pmixrelay_leave(&t.relay));
    ANSWERS(LEFT, "");
    assert_true(t.left);
    assert_true(pmixrelay_leave(&t.relay));
    assert_int_equal(read(t.server, (char[1]){0}, 1), 0);
}

static void renews(const char *nspace)
{
    (void)close(t.server);
    t.parked = t.left = false;
    t.server = pmixrelay_renew(&t.relay, nspace);
    assert_true(t.server >= 0);
}

static void a_new_server_is_told_what_the_last_one_was(void **state)
{
    (void)state;
    begins();
    leaves();
    renews(NEW);
    /* The program continues at once; its request waits. */
    ASKS(GET("\x28", "$" OLD), GREETING("=", NEW));
    assert_string_equal(pmixrelay_obstacle(&t.relay), "is not known to its new PMIx server yet");
    SENDS(t.server, t.server, GREETED, REGISTER);
    SENDS(t.server, t.server, GOOD("\x66"), COMMIT);
    SENDS(t.server, t.server, GOOD("\x6a"), GET("\x29", "&" NEW));
    ANSWERS(GOT("\x4a", "\x46", "&" NEW), GOT("\x49", "\x45", "$" OLD));
    ASKS(FENCE("\x1f", "$" OLD), FENCE("\x20", "&" NEW));
    ANSWERS(GOOD("\x72"), GOOD("\x72"));
    leaves();
    renews(OLD);
    SENDS(-1, t.server, "", GREETING("<", OLD));
}

static void what_has_no_answer_does_not_wait(void **state)
{
    (void)state;
    begins();
    ASKS(DEREGISTER, DEREGISTER);
    leaves();
    renews(NEW);
    SENDS(-1, t.server, "", GREETING("=", NEW));
    SENDS(t.server, t.server, GREETED, REGISTER);
    SENDS(t.server, t.server, GOOD("\x66"), COMMIT);
    SENDS(t.server, t.server, GOOD("\x6a"), DEREGISTER);
    ASKS(FENCE("\x1f", "$" OLD), FENCE("\x20", "&" NEW));
}

static void an_open_request_is_an_obstacle(void **state)
{
    (void)state;
    assert_string_equal(pmixrelay_obstacle(&t.relay), "exchanges data with its PMIx server");
    begins();
    ASKS(FENCE("\x1f", "$" OLD), FENCE("\x1f", "$" OLD));
    assert_string_equal(pmixrelay_obstacle(&t.relay), "waits for an answer of its PMIx server");
    t.parked = true;
    assert_false(pmixrelay_leave(&t.relay));
    SENDS(-1, t.server, "", "");
    ANSWERS(GOOD("\x72"), GOOD("\x72"));
    leaves();
}

static void a_parked_program_is_not_read(void **state)
{
    (void)state;
    begins();
    t.parked = true;
    ASKS(FENCE("\x1f", "$" OLD), "");
    leaves();
    renews(OLD);
    SENDS(-1, t.server, "", GREETING("<", OLD));
    SENDS(t.server, t.server, GREETED, REGISTER);
    SENDS(t.server, t.server, GOOD("\x66"), COMMIT);
    SENDS(t.server, t.server, GOOD("\x6a"), FENCE("\x1f", "$" OLD));
}

/* It has the values of those before. One without values has nothing. */
static void only_the_last_commit_is_told(void **state)
{
    (void)state;
#define LATER HEADER("\x6b", "\3") "\2\2x"
#define EMPTY HEADER("\x6c", "\2") "\2\2"
    begins();
    ASKS(LATER, LATER);
    ANSWERS(GOOD("\x6b"), GOOD("\x6b"));
    ASKS(EMPTY, EMPTY);
    ANSWERS(GOOD("\x6c"), GOOD("\x6c"));
    leaves();
    renews(OLD);
    SENDS(-1, t.server, "", GREETING("<", OLD));
    SENDS(t.server, t.server, GREETED, REGISTER);
    SENDS(t.server, t.server, GOOD("\x66"), LATER);
    SENDS(t.server, t.server, GOOD("\x6b"), "");
    assert_null(pmixrelay_obstacle(&t.relay));
}

/* Otherwise Slurm would see a program that has died. */
static void a_finalized_program_is_finalized_for_a_new_server(void **state)
{
    (void)state;
    begins();
    ASKS(FINALIZE, FINALIZE);
    ANSWERS(GOOD("\x74"), GOOD("\x74"));
    leaves();
    renews(OLD);
    SENDS(-1, t.server, "", GREETING("<", OLD));
    SENDS(t.server, t.server, GREETED, REGISTER);
    SENDS(t.server, t.server, GOOD("\x66"), COMMIT);
    SENDS(t.server, t.server, GOOD("\x6a"), FINALIZE);
    SENDS(t.server, t.server, GOOD("\x74"), "");
    assert_null(pmixrelay_obstacle(&t.relay));
}

static void a_server_that_refuses_is_a_failure(void **state)
{
    (void)state;
    begins();
    leaves();
    renews(NEW);
    SENDS(-1, t.server, "", GREETING("=", NEW));
    SENDS(t.server, t.program, "\xff\xff\xff\xd2", "");
    assert_true(t.failed);
}

static void a_server_that_ends_is_a_failure(void **state)
{
    (void)state;
    begins();
    leaves();
    renews(NEW);
    assert_int_equal(shutdown(t.server, SHUT_RDWR), 0);
    turn();
    assert_true(t.failed);
}

static void other_protocols_pass_and_are_an_obstacle(void **state)
{
    (void)state;
    ASKS("hello", "hello");
    ANSWERS("12345678and more", "12345678and more");
    assert_string_equal(pmixrelay_obstacle(&t.relay),
                        "uses PMIx in a way that a checkpoint does not know");
    assert_int_equal(shutdown(t.program, SHUT_WR), 0);
    turn();
    assert_int_equal(read(t.server, (char[1]){0}, 1), 0);
    ANSWERS("rest", "rest");
    (void)shutdown(t.server, SHUT_RDWR);
    turn();
    assert_int_equal(read(t.program, (char[1]){0}, 1), 0);
    assert_int_equal(t.relay.phase, PMIXRELAY_OVER);
}

/* The answer to the greeting may be shorter. */
static void an_unknown_version_passes_and_is_an_obstacle(void **state)
{
    (void)state;
    ASKS(NOBODY "\6\0\0\0\0\0\0\0native", NOBODY "\6\0\0\0\0\0\0\0native");
    ANSWERS("well", "well");
    ASKS("and", "and");
    assert_string_equal(pmixrelay_obstacle(&t.relay),
                        "has a version of PMIx that a checkpoint does not know");
}

/* It has begun after the checkpoint, so the checkpoint could not wait for it. */
static void an_unknown_version_cannot_be_renamed(void **state)
{
    (void)state;
    strcpy(t.relay.other, NEW);
    ASKS(NOBODY "\6\0\0\0\0\0\0\0native", "");
    assert_true(t.failed);
}

static void groups_are_an_obstacle(void **state)
{
    (void)state;
    begins();
    ASKS(HEADER("\x77", "\2") "\2\x18", HEADER("\x77", "\2") "\2\x18");
    ANSWERS(GOOD("\x77"), GOOD("\x77"));
    assert_string_equal(pmixrelay_obstacle(&t.relay),
                        "has used PMIx to find or to follow other programs");
}

static void more_than_a_checkpoint_keeps_is_an_obstacle(void **state)
{
    static uint8_t value[PMIX_HEADER + 0x9000] = HEADER("\x77", "\0") "\2\r";
    struct pmixrecord r = {0};
    (void)state;
    pmixrecord_greeting(&r, (const uint8_t *)GREETING("<", OLD), sizeof GREETING("<", OLD) - 1);
    for (int i = 0; i < 2; i++) {
        pmixrecord_request(&r, value, sizeof value);
        assert_int_equal(pmixrecord_answer(&r, value), PMIX_REGISTER_EVENTS);
        assert_int_equal(pmixrecord_obstacle(&r) != NULL, i == 1);
        assert_true(r.kept.len <= PMIXRECORD_MAX);
    }
    pmixrecord_free(&r);
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(a_new_server_is_told_what_the_last_one_was),
        CASE(what_has_no_answer_does_not_wait),
        CASE(an_open_request_is_an_obstacle),
        CASE(a_parked_program_is_not_read),
        CASE(only_the_last_commit_is_told),
        CASE(a_finalized_program_is_finalized_for_a_new_server),
        CASE(a_server_that_refuses_is_a_failure),
        CASE(a_server_that_ends_is_a_failure),
        CASE(other_protocols_pass_and_are_an_obstacle),
        CASE(an_unknown_version_passes_and_is_an_obstacle),
        CASE(an_unknown_version_cannot_be_renamed),
        CASE(groups_are_an_obstacle),
        CASE(more_than_a_checkpoint_keeps_is_an_obstacle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
