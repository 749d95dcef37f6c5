/* SPDX-License-Identifier: Apache-2.0 */
/* A hostile or broken guest: each violation closes the channel, and clients are informed. */
#include "rig_shim.h"

static struct peer_frame got;
static uint8_t zeros[VHPC_PAYLOAD_MAX];

static void put_credit(int fd, uint32_t session, uint8_t number, uint32_t n)
{
    uint8_t raw[4];
    put_le32(raw, n);
    say(fd, VHPC_CREDIT, number, 0, session, 0, raw, sizeof raw);
}

static bool is_broken(struct rig *r)
{
    rig_turn(r);
    return r->shim.ended && r->shim.status == SHIM_AGENT_BROKEN;
}

static void output_reaches_its_client_and_no_other(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, getuid());
    int one = rig_running(&r, 1), two = rig_running(&r, 2);
    say(r.guest, VHPC_DATA, 1, 0, 2, 0, "second", 6);
    say(r.guest, VHPC_DATA, 2, 0, 1, 0, "first", 5);
    rig_turn(&r);
    assert_true(hear(one, &got));
    assert_int_equal(got.head.fd, 2);
    assert_int_equal(got.head.session, 0);
    assert_memory_equal(got.payload, "first", 5);
    assert_false(hear(one, &got));
    assert_true(hear(two, &got));
    assert_memory_equal(got.payload, "second", 6);
    assert_false(r.shim.ended);
    (void)close(one);
    (void)close(two);
    rig_close(&r);
}

static void a_client_that_does_not_read_stops_nobody_else(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, getuid());
    int deaf = rig_running(&r, 1), other = rig_running(&r, 2);
    for (int i = 0; i < 15; i++) {
        say(r.guest, VHPC_DATA, 1, 0, 1, 0, zeros, 65536);
        rig_turn(&r);
    }
    say(r.guest, VHPC_DATA, 1, 0, 2, 0, "x", 1);
    rig_turn(&r);
    assert_true(hear(other, &got));
    assert_int_equal(got.head.length, 1);
    assert_false(r.shim.ended);
    (void)close(deaf);
    (void)close(other);
    rig_close(&r);
}

/* promise: attack.channel */
static void data_beyond_the_window_breaks_the_guest(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, getuid());
    int client = rig_running(&r, 1);
    for (int i = 0; i < 15; i++) {
        say(r.guest, VHPC_DATA, 1, 0, 1, 0, zeros, 65536);
        rig_turn(&r);
    }
    assert_false(r.shim.ended);
    say(r.guest, VHPC_DATA, 1, 0, 1, 0, zeros, 65536);
    assert_true(is_broken(&r));
    /* The client gets what was sent before, then the reason, then nothing more. */
    static uint8_t heard[1 << 20];
    size_t size = 0, at = 0;
    for (ssize_t n; (n = read(client, heard + size, sizeof heard - size)) != 0;) {
        if (n < 0)
            rig_turn(&r);
        else
            size += (size_t)n;
    }
    struct frame f;
    for (int i = 0; i < 15; i++, at += VHPC_HEADER + f.length) {
        assert_int_equal(frame_unpack(heard + at, &f), 0);
        assert_int_equal(f.type, VHPC_DATA);
        assert_int_equal(f.length, 65536);
    }
    assert_int_equal(frame_unpack(heard + at, &f), 0);
    assert_int_equal(f.type, VHPC_ERROR);
    assert_int_equal(at + VHPC_HEADER + f.length, size);
    f.payload = heard + at + VHPC_HEADER;
    struct error_info e;
    assert_int_equal(error_parse(&f, &e), 0);
    assert_int_equal(e.kind, VHPC_ERR_GONE);
    assert_string_equal(e.text,
                        "the guest violated the channel's protocol: DATA without credit for it");
    (void)close(client);
    rig_close(&r);
}

/* Each sends one frame that a guest may not send while session 1 runs. */
static void v_header(int g)
{
    say(g, 99, 0, 0, 1, 0, NULL, 0);
}
static void v_unknown_session(int g)
{
    say(g, VHPC_DATA, 1, 0, 77, 0, "x", 1);
}
static void v_session_zero(int g)
{
    say(g, VHPC_PONG, 0, 0, 0, 0, NULL, 0);
}
static void v_unasked_reply(int g)
{
    say(g, VHPC_REPLY, 0, 0, 1, 0, NULL, 0);
}
static void v_unasked_pong(int g)
{
    say(g, VHPC_PONG, 0, 0, 1, 0, NULL, 0);
}
static void v_ping(int g)
{
    say(g, VHPC_PING, 0, 0, 1, 0, NULL, 0);
}
static void v_request(int g)
{
    say(g, VHPC_REQUEST, 0, 0, 1, 0, NULL, 0);
}
static void v_exec(int g)
{
    say_exec(g, 1, 0, 0);
}
static void v_signal(int g)
{
    say(g, VHPC_SIGNAL, 0, 0, 1, 0, "\017\0\0", 4);
}
static void v_close(int g)
{
    say(g, VHPC_CLOSE, 0, 0, 1, 0, NULL, 0);
}
static void v_started(int g)
{
    say(g, VHPC_STARTED, 0, 0, 1, 0, NULL, 0);
}
static void v_stdin_data(int g)
{
    say(g, VHPC_DATA, 0, 0, 1, 0, "x", 1);
}
static void v_credit(int g)
{
    put_credit(g, 1, 0, 1);
}
static void v_call_zero_data(int g)
{
    say(g, VHPC_DATA, 1, 0, 1, 1, "x", 1);
}
static void v_bad_hello(int g)
{
    say(g, VHPC_HELLO, 0, 0, 0, 0, "junk", 4);
}
static void v_call_uid(int g)
{
    say(g, VHPC_EXEC, 0, 0, 1, 1, "junk", 4);
}
static void v_after_exit(int g)
{
    say(g, VHPC_EXIT, 0, 0, 1, 0, NULL, 0);
    say(g, VHPC_DATA, 1, 0, 1, 0, "x", 1);
}
static void v_too_many_calls(int g)
{
    for (uint32_t call = 1; call <= VHPC_CALLS_MAX + 1; call++)
        say_exec(g, 1, call, 0);
}
static void v_reboot(int g)
{
    struct buf b = {0};
    (void)tlv_put_u32(&b, TAG_VERSION_MIN, 1);
    (void)tlv_put_u32(&b, TAG_VERSION_MAX, 1);
    (void)tlv_put_str(&b, TAG_BOOT_ID, "another");
    say(g, VHPC_HELLO, 0, 0, 0, 0, buf_head(&b), b.len);
    buf_free(&b);
}

/* promise: attack.channel, attack.call-flood */
static void what_a_guest_may_not_say_breaks_it(void **state)
{
    void (*const violation[])(int) = {
        v_header,   v_unknown_session, v_session_zero,   v_unasked_reply,  v_unasked_pong,
        v_ping,     v_request,         v_exec,           v_signal,         v_close,
        v_started,  v_stdin_data,      v_credit,         v_call_zero_data, v_bad_hello,
        v_call_uid, v_after_exit,      v_too_many_calls, v_reboot,
    };
    (void)state;
    for (size_t i = 0; i < sizeof violation / sizeof violation[0]; i++) {
        struct rig r;
        rig_open(&r, getuid());
        int client = rig_running(&r, 1);
        violation[i](r.guest);
        if (!is_broken(&r))
            fail_msg("violation %zu went unnoticed", i);
        (void)close(client);
        rig_close(&r);
    }
}

static void frames_before_hello_break_the_guest(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, getuid());
    say(r.guest, VHPC_DATA, 1, 0, 1, 0, "x", 1);
    assert_true(is_broken(&r));
    rig_close(&r);
}

/* A guest that was saved just before it answered: the answer comes when it is restored. */
static void answers_to_the_last_host_are_ignored(void **state)
{
    static const uint8_t types[] = {VHPC_REPLY, VHPC_PONG};
    struct rig r;
    (void)state;
    rig_open(&r, getuid());
    for (size_t i = 0; i < sizeof types; i++) {
        say(r.guest, types[i], 0, 0, 7, 0, "x", 1);
        assert_false(is_broken(&r));
    }
    (void)close(rig_running(&r, 1));
    rig_close(&r);
}

static void frames_that_cross_a_clients_end_are_ignored(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, getuid());
    int client = rig_running(&r, 1);
    (void)close(client);
    rig_turn(&r);
    assert_true(hear(r.guest, &got));
    assert_int_equal(got.head.type, VHPC_CLOSE);
    assert_int_equal(got.head.session, 1);
    say(r.guest, VHPC_DATA, 1, 0, 1, 0, "late", 4);
    rig_turn(&r);
    assert_false(r.shim.ended);
    rig_close(&r);
}

static void a_guest_that_closes_is_gone_and_not_broken(void **state)
{
    struct rig r;
    struct error_info e;
    (void)state;
    rig_open(&r, getuid());
    int client = rig_running(&r, 1);
    (void)shutdown(r.guest, SHUT_RDWR);
    rig_turn(&r);
    assert_true(r.shim.ended);
    assert_int_equal(r.shim.status, SHIM_AGENT_CLOSED);
    assert_true(hear(client, &got));
    assert_int_equal(got.head.type, VHPC_ERROR);
    assert_int_equal(error_parse(&got.head, &e), 0);
    assert_int_equal(e.kind, VHPC_ERR_GONE);
    assert_true(hung_up(client));
    (void)close(client);
    rig_close(&r);
}

static void a_host_call_is_passed_both_ways(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, getuid());
    int client = rig_running(&r, 1);
    say_exec(r.guest, 1, 1, 0);
    rig_turn(&r);
    assert_true(hear(client, &got));
    assert_int_equal(got.head.type, VHPC_EXEC);
    assert_int_equal(got.head.call, 1);
    say(client, VHPC_STARTED, 0, 0, 0, 1, NULL, 0);
    say(client, VHPC_DATA, 1, 0, 0, 1, "out", 3);
    say(client, VHPC_EXIT, 0, 0, 0, 1, NULL, 0);
    rig_turn(&r);
    assert_true(hear(r.guest, &got));
    assert_int_equal(got.head.type, VHPC_STARTED);
    assert_true(hear(r.guest, &got));
    assert_int_equal(got.head.session, 1);
    assert_int_equal(got.head.call, 1);
    assert_memory_equal(got.payload, "out", 3);
    /*
     * A call's number is not used again: late frames for it are ignored, and a new call has a new
     * number.
     */
    say(r.guest, VHPC_CLOSE, 0, 0, 1, 1, NULL, 0);
    say_exec(r.guest, 1, 2, 0);
    rig_turn(&r);
    assert_false(r.shim.ended);
    assert_true(hear(client, &got));
    assert_int_equal(got.head.call, 2);
    (void)close(client);
    rig_close(&r);
}

int main(void)
{
    (void)signal(SIGPIPE, SIG_IGN); /* as vhpc-shim does */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(output_reaches_its_client_and_no_other),
        cmocka_unit_test(a_client_that_does_not_read_stops_nobody_else),
        cmocka_unit_test(data_beyond_the_window_breaks_the_guest),
        cmocka_unit_test(what_a_guest_may_not_say_breaks_it),
        cmocka_unit_test(frames_before_hello_break_the_guest),
        cmocka_unit_test(answers_to_the_last_host_are_ignored),
        cmocka_unit_test(frames_that_cross_a_clients_end_are_ignored),
        cmocka_unit_test(a_guest_that_closes_is_gone_and_not_broken),
        cmocka_unit_test(a_host_call_is_passed_both_ways),
    };
    return cmocka_run_group_tests_name("shim against the guest", tests, NULL, NULL);
}
