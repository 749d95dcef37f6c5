/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of a command (docs/guest-protocol.md sections 4 and 5), one sentence per test. */
#include <string.h>

#include "check.h"
#include "flow.h"

/* FDS: 0 in, 1 out, 2 out; UID: 2001. */
static const uint8_t exec_head[] = {16, 0,  0, 0, 6, 0, 0, 0, 0, 1,    1, 2, 2,
                                    2,  17, 0, 0, 0, 4, 0, 0, 0, 0xd1, 7, 0, 0};
static uint8_t payload[VHPC_PAYLOAD_MAX];

static enum flow_verdict say(struct flow *f, enum flow_side from, uint8_t type, uint8_t fd,
                             uint16_t flags, uint32_t length)
{
    struct frame frame = {
        .type = type, .fd = fd, .flags = flags, .length = length, .payload = payload};
    return flow_check(f, from, &frame);
}

static enum flow_verdict grant(struct flow *f, enum flow_side from, uint8_t fd, uint32_t n)
{
    uint8_t raw[4];
    put_le32(raw, n);
    struct frame frame = {.type = VHPC_CREDIT, .fd = fd, .length = 4, .payload = raw};
    return flow_check(f, from, &frame);
}

static enum flow_verdict ask(struct flow *f)
{
    struct frame frame = {.type = VHPC_EXEC, .length = sizeof exec_head, .payload = exec_head};
    return flow_check(f, FLOW_INITIATOR, &frame);
}

static struct flow running(void)
{
    struct flow f = {0};
    assert_int_equal(ask(&f), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_STARTED, 0, 0, 0), FLOW_PASS);
    return f;
}

static void exec_tells_uid_and_lanes(void **state)
{
    (void)state;
    struct flow f = running();
    assert_int_equal(f.uid, 2001);
    assert_int_equal(flow_room(&f, FLOW_INITIATOR, 0), 1048576 - 16);
    assert_int_equal(flow_room(&f, FLOW_EXECUTOR, 0), 0);
    assert_int_equal(flow_room(&f, FLOW_EXECUTOR, 1), 1048576 - 16);
}

static void exec_without_fds_and_uid_in_front_is_broken(void **state)
{
    (void)state;
    struct flow f = {0};
    struct frame frame = {.type = VHPC_EXEC, .length = 14, .payload = exec_head};
    assert_int_equal(flow_check(&f, FLOW_INITIATOR, &frame), FLOW_BROKEN);
    f = (struct flow){0};
    frame.payload = exec_head + 14;
    frame.length = 12;
    assert_int_equal(flow_check(&f, FLOW_INITIATOR, &frame), FLOW_BROKEN);
}

static void fd_lists_with_doubles_or_large_numbers_are_broken(void **state)
{
    (void)state;
    uint8_t head[sizeof exec_head];
    struct frame frame = {.type = VHPC_EXEC, .length = sizeof head, .payload = head};
    const struct {
        size_t at;
        uint8_t value;
    } bad[] = {{10, 0}, {8, 8}, {9, 0}, {9, 4}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct flow f = {0};
        memcpy(head, exec_head, sizeof head);
        head[bad[i].at] = bad[i].value;
        assert_int_equal(flow_check(&f, FLOW_INITIATOR, &frame), FLOW_BROKEN);
    }
}

static void a_window_is_all_that_may_be_on_the_way(void **state)
{
    (void)state;
    struct flow f = running();
    for (int i = 0; i < 3; i++)
        assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 1, 0, 262144), FLOW_PASS);
    /* 3 * (262144 + 16) are used: 262096 are left, 16 of them for a header. */
    assert_int_equal(flow_room(&f, FLOW_EXECUTOR, 1), 262080);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 1, 0, 262081), FLOW_BROKEN);
    assert_string_equal(f.why, "DATA without credit for it");
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 1, 0, 262080), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 2, 0, 262144), FLOW_PASS); /* another lane */
}

static void one_byte_frames_cost_their_headers(void **state)
{
    (void)state;
    struct flow f = running();
    int frames = 0;
    while (say(&f, FLOW_INITIATOR, VHPC_DATA, 0, 0, 1) == FLOW_PASS)
        frames++;
    assert_int_equal(frames, 1048576 / 17);
}

static void credit_gives_back_what_was_sent_and_no_more(void **state)
{
    (void)state;
    struct flow f = running();
    assert_int_equal(grant(&f, FLOW_INITIATOR, 1, 1), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 1, 0, 100), FLOW_PASS);
    assert_int_equal(grant(&f, FLOW_INITIATOR, 1, 117), FLOW_BROKEN);
    assert_int_equal(grant(&f, FLOW_INITIATOR, 1, 0), FLOW_BROKEN);
    assert_int_equal(grant(&f, FLOW_EXECUTOR, 1, 116), FLOW_BROKEN); /* the sender itself */
    assert_int_equal(grant(&f, FLOW_INITIATOR, 1, 0xffffffff), FLOW_BROKEN);
    assert_int_equal(grant(&f, FLOW_INITIATOR, 1, 116), FLOW_PASS);
    assert_int_equal(flow_room(&f, FLOW_EXECUTOR, 1), 1048576 - 16);
}

static void nothing_follows_eof_on_its_lane(void **state)
{
    (void)state;
    struct flow f = running();
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_EOF, 0, 0, 0), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_DATA, 0, 0, 1), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_EOF, 0, 0, 0), FLOW_BROKEN);
    assert_int_equal(flow_room(&f, FLOW_INITIATOR, 0), 0);
}

static void a_reader_that_is_gone_stops_the_sender_but_not_what_is_on_the_way(void **state)
{
    (void)state;
    struct flow f = running();
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_EOF, 1, VHPC_READER, 0), FLOW_PASS);
    assert_int_equal(flow_room(&f, FLOW_EXECUTOR, 1), 0);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 1, 0, 9), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_EOF, 1, 0, 0), FLOW_PASS);
}

static void data_goes_on_declared_lanes_and_in_their_direction(void **state)
{
    (void)state;
    struct flow f = running();
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 0, 0, 1), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_DATA, 1, 0, 1), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 5, 0, 1), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 200, 0, 1), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 1, 0, 0), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 1, VHPC_MORE, 1), FLOW_BROKEN);
}

static void order_of_a_command_is_kept(void **state)
{
    (void)state;
    struct flow f = {0};
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_STARTED, 0, 0, 0), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_SIGNAL, 0, 0, 4), FLOW_BROKEN);
    assert_int_equal(ask(&f), FLOW_PASS);
    assert_int_equal(ask(&f), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 1, 0, 1), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_EXIT, 0, 0, 0), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_STARTED, 0, 0, 0), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_STARTED, 0, 0, 0), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_STARTED, 0, 0, 0), FLOW_BROKEN);
}

static void after_the_end_the_executor_is_silent_and_the_initiator_ignored(void **state)
{
    (void)state;
    struct flow f = running();
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_EXIT, 0, 0, 12), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_DATA, 0, 0, 10), FLOW_DROP);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 1, 0, 10), FLOW_BROKEN);
}

static void after_close_the_initiator_is_silent_and_the_executor_ignored(void **state)
{
    (void)state;
    struct flow f = running();
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_CLOSE, 0, 0, 0), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_CLOSE, 0, 0, 0), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 1, 0, 10), FLOW_DROP);
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_DATA, 0, 0, 10), FLOW_BROKEN);
}

static void exec_may_have_parts_up_to_eight_mebibytes(void **state)
{
    (void)state;
    struct flow f = {0};
    struct frame first = {
        .type = VHPC_EXEC, .flags = VHPC_MORE, .length = sizeof exec_head, .payload = exec_head};
    assert_int_equal(flow_check(&f, FLOW_INITIATOR, &first), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_EXEC, 0, VHPC_MORE, 0), FLOW_BROKEN);
    for (int i = 0; i < 31; i++)
        assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_EXEC, 0, VHPC_MORE, 262144), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_EXEC, 0, VHPC_MORE, 262144), FLOW_BROKEN);
}

static void signals_are_numbers_that_exist(void **state)
{
    (void)state;
    struct flow f = running();
    uint8_t raw[4];
    struct frame frame = {.type = VHPC_SIGNAL, .length = 4, .payload = raw};
    put_le32(raw, 15);
    assert_int_equal(flow_check(&f, FLOW_INITIATOR, &frame), FLOW_PASS);
    assert_int_equal(flow_check(&f, FLOW_EXECUTOR, &frame), FLOW_BROKEN);
    put_le32(raw, 0);
    assert_int_equal(flow_check(&f, FLOW_INITIATOR, &frame), FLOW_BROKEN);
    put_le32(raw, 65);
    assert_int_equal(flow_check(&f, FLOW_INITIATOR, &frame), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_WINSIZE, 0, 0, 7), FLOW_BROKEN);
}

static void sync_asks_for_the_credit_of_what_is_on_the_way(void **state)
{
    (void)state;
    struct flow f = running();
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_SYNC, 1, 0, 0), FLOW_DROP); /* nothing is */
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 1, 0, 84), FLOW_PASS);
    assert_false(flow_settled(&f, 1));
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_SYNC, 1, 0, 1), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_SYNC, 1, 0, 0), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_SYNC, 1, 0, 0), FLOW_DROP); /* unanswered */
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 1, 0, 84), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_SYNC, 1, 0, 0), FLOW_PASS);
    assert_int_equal(grant(&f, FLOW_INITIATOR, 1, 50), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_EOF, 1, 0, 0), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_SYNC, 1, 0, 0), FLOW_PASS); /* after EOF */
    assert_int_equal(grant(&f, FLOW_INITIATOR, 1, 150), FLOW_PASS);
    assert_true(flow_settled(&f, 1));
}

static void sync_comes_from_the_executor_after_started_on_a_declared_lane(void **state)
{
    (void)state;
    struct flow f = {0};
    assert_int_equal(ask(&f), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_SYNC, 1, 0, 0), FLOW_BROKEN);
    f = running();
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_DATA, 1, 0, 84), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_DATA, 0, 0, 84), FLOW_PASS);
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_SYNC, 1, 0, 0), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_INITIATOR, VHPC_SYNC, 0, 0, 0), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_SYNC, 0, 0, 0), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_SYNC, 5, 0, 0), FLOW_BROKEN);
    assert_int_equal(say(&f, FLOW_EXECUTOR, VHPC_SYNC, 200, 0, 0), FLOW_BROKEN);
    assert_true(flow_settled(&f, 5) && flow_settled(&f, 2));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exec_tells_uid_and_lanes),
        cmocka_unit_test(exec_without_fds_and_uid_in_front_is_broken),
        cmocka_unit_test(fd_lists_with_doubles_or_large_numbers_are_broken),
        cmocka_unit_test(a_window_is_all_that_may_be_on_the_way),
        cmocka_unit_test(one_byte_frames_cost_their_headers),
        cmocka_unit_test(credit_gives_back_what_was_sent_and_no_more),
        cmocka_unit_test(nothing_follows_eof_on_its_lane),
        cmocka_unit_test(a_reader_that_is_gone_stops_the_sender_but_not_what_is_on_the_way),
        cmocka_unit_test(data_goes_on_declared_lanes_and_in_their_direction),
        cmocka_unit_test(order_of_a_command_is_kept),
        cmocka_unit_test(after_the_end_the_executor_is_silent_and_the_initiator_ignored),
        cmocka_unit_test(after_close_the_initiator_is_silent_and_the_executor_ignored),
        cmocka_unit_test(exec_may_have_parts_up_to_eight_mebibytes),
        cmocka_unit_test(signals_are_numbers_that_exist),
        cmocka_unit_test(sync_asks_for_the_credit_of_what_is_on_the_way),
        cmocka_unit_test(sync_comes_from_the_executor_after_started_on_a_declared_lane),
    };
    return cmocka_run_group_tests_name("flow", tests, NULL, NULL);
}
