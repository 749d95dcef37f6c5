/* SPDX-License-Identifier: Apache-2.0 */
/* Clients: what each may do, and that a violation harms only the client itself. */
#include "rig_shim.h"

static struct peer_frame got;

static void expect_refusal(int client, uint32_t number)
{
    struct error_info e;
    assert_true(hear(client, &got));
    while (got.head.type == VHPC_HELLO)
        assert_true(hear(client, &got));
    assert_int_equal(got.head.type, VHPC_ERROR);
    assert_int_equal(error_parse(&got.head, &e), 0);
    assert_int_equal(e.kind, VHPC_ERR_REFUSED);
    assert_int_equal(e.number, number);
    assert_true(hung_up(client));
}

static void a_client_that_comes_early_is_told_and_waits(void **state)
{
    struct rig r;
    struct hello h;
    (void)state;
    rig_open(&r, getuid());
    int client = rig_client(&r);
    say_hello(client, false);
    rig_turn(&r);
    assert_true(hear(client, &got));
    assert_int_equal(hello_parse(&got.head, &h), 0);
    assert_int_equal(h.state, VHPC_STATE_BOOTING);
    say_hello(r.guest, true);
    say_hello(r.guest, true); /* the answer to the shim's own HELLO */
    rig_turn(&r);
    assert_true(hear(client, &got));
    assert_int_equal(hello_parse(&got.head, &h), 0);
    assert_int_equal(h.state, VHPC_STATE_UP);
    assert_string_equal(h.agent_version, "9.9");
    assert_false(hear(client, &got));
    (void)close(client);
    rig_close(&r);
}

/* promise: attack.neighbour */
static void another_user_is_refused(void **state)
{
    struct rig r;
    (void)state;
    if (getuid() == 0 && (setegid(65534) < 0 || seteuid(65534) < 0))
        fail();
    rig_open(&r, geteuid() + 1);
    int client = rig_client(&r);
    rig_turn(&r);
    expect_refusal(client, 1 /* EPERM */);
    (void)close(client);
    rig_close(&r);
    if (getuid() == 0 && (seteuid(0) < 0 || setegid(0) < 0))
        fail();
}

static int greeted(struct rig *r)
{
    int client = rig_client(r);
    say_hello(client, false);
    say_hello(r->guest, true);
    rig_turn(r);
    assert_true(hear(client, &got));
    while (hear(r->guest, &got))
        ;
    return client;
}

/* As another user, because root may do all that is refused here. */
static void as_nobody(struct rig *r, void (*act)(int client))
{
    if (getuid() == 0 && (setegid(65534) < 0 || seteuid(65534) < 0))
        fail();
    rig_open(r, geteuid());
    int client = greeted(r);
    act(client);
    rig_turn(r);
    expect_refusal(client, 1 /* EPERM */);
    while (hear(r->guest, &got))
        assert_int_equal(got.head.type, VHPC_HELLO); /* the guest has received nothing of it */
    (void)close(client);
    rig_close(r);
    if (getuid() == 0 && (seteuid(0) < 0 || setegid(0) < 0))
        fail();
}

static void exec_as_root(int client)
{
    say_exec(client, 0, 0, 0);
}

static void request(int client)
{
    say(client, VHPC_REQUEST, 0, 0, 0, 0, NULL, 0);
}

static void the_user_may_not_run_as_another_one(void **state)
{
    struct rig r;
    (void)state;
    as_nobody(&r, exec_as_root);
}

static void control_operations_are_roots(void **state)
{
    struct rig r;
    (void)state;
    as_nobody(&r, request);
}

static void a_bad_client_is_dropped_and_the_others_go_on(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, getuid());
    int bad = rig_running(&r, 1), good = rig_running(&r, 2);
    say(bad, VHPC_DATA, 1, 0, 0, 0, "x", 1); /* clients may not write to stdout */
    rig_turn(&r);
    assert_true(hung_up(bad));
    assert_true(hear(r.guest, &got));
    assert_int_equal(got.head.type, VHPC_CLOSE);
    assert_int_equal(got.head.session, 1);
    assert_false(r.shim.ended);
    say(good, VHPC_DATA, 0, 0, 0, 0, "in", 2);
    rig_turn(&r);
    assert_true(hear(r.guest, &got));
    assert_int_equal(got.head.session, 2);
    assert_memory_equal(got.payload, "in", 2);
    (void)close(bad);
    (void)close(good);
    rig_close(&r);
}

static void d_session(int c)
{
    say(c, VHPC_PING, 0, 0, 2, 0, NULL, 0);
}
static void d_second_hello(int c)
{
    say_hello(c, false);
}
static void d_second_exec(int c)
{
    say_exec(c, 0, 0, (uint32_t)getuid());
}
static void d_answer(int c)
{
    say(c, VHPC_REPLY, 0, 0, 0, 0, NULL, 0);
}
static void d_unknown_call(int c)
{
    say(c, VHPC_STARTED, 0, 0, 0, 5, NULL, 0);
}
static void d_call_exec(int c)
{
    say_exec(c, 0, 1, 0);
}
static void d_header(int c)
{
    say(c, 0, 0, 0, 0, 0, NULL, 0);
}
static void d_exit(int c)
{
    say(c, VHPC_EXIT, 0, 0, 0, 0, NULL, 0);
}
static void d_pings(int c)
{
    for (int i = 0; i <= VHPC_PENDING_MAX; i++)
        say(c, VHPC_PING, 0, 0, 0, 0, NULL, 0);
}
static void data_beyond_the_window_drops_a_client(void **state)
{
    static uint8_t zeros[65536];
    struct rig r;
    (void)state;
    rig_open(&r, getuid());
    int client = rig_running(&r, 1);
    for (int i = 0; i < 15; i++) {
        say(client, VHPC_DATA, 0, 0, 0, 0, zeros, sizeof zeros);
        rig_turn(&r);
        /* Read what the shim sends, so that it continues to read. */
        while (hear(r.guest, &got))
            rig_turn(&r);
    }
    assert_int_equal(got.head.type, VHPC_DATA);
    assert_false(hung_up(client));
    say(client, VHPC_DATA, 0, 0, 0, 0, zeros, sizeof zeros);
    rig_turn(&r);
    assert_true(hung_up(client));
    assert_false(r.shim.ended);
    (void)close(client);
    rig_close(&r);
}

static void what_a_client_may_not_say_drops_it(void **state)
{
    void (*const violation[])(int) = {d_session, d_second_hello, d_second_exec,
                                      d_answer,  d_unknown_call, d_call_exec,
                                      d_header,  d_exit,         d_pings};
    (void)state;
    for (size_t i = 0; i < sizeof violation / sizeof violation[0]; i++)
        rig_drops(violation[i], i);
}

static void frames_before_hello_is_answered_drop_the_client(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, getuid());
    int client = rig_client(&r);
    say_exec(client, 0, 0, (uint32_t)getuid());
    rig_turn(&r);
    assert_true(hung_up(client));
    (void)close(client);
    rig_close(&r);
}

/* A program whose stdout is not read: what the guest sends for it waits in the shim. */
static int stalled(struct rig *r, uint32_t session, size_t bytes)
{
    static uint8_t block[VHPC_PAYLOAD_MAX];
    int client = rig_client(r);
    int small = 4096;
    (void)setsockopt(client, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    say_hello(client, false);
    rig_turn(r);
    struct client *c = client_find(&r->shim, session);
    assert_non_null(c);
    (void)buf_append(&c->chan.out, block, 1);
    while (c->chan.out.len < bytes)
        assert_int_equal(buf_append(&c->chan.out, block, sizeof block), 0);
    return client;
}

/* promise: attack.channel-memory */
static void clients_that_do_not_read_share_one_limit(void **state)
{
    struct rig r;
    int clients[5];
    (void)state;
    rig_open(&r, getuid());
    say_hello(r.guest, true);
    rig_turn(&r);
    for (uint32_t i = 0; i < 5; i++)
        clients[i] = stalled(&r, i + 1, (i == 2 ? 200u : 30u) << 20);
    rig_turn(&r);
    /* buffers double: 256 MiB, and 32 MiB four times */
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(client_find(&r.shim, i + 1) == NULL, i == 2);
    for (size_t i = 0; i < 5; i++)
        (void)close(clients[i]);
    rig_close(&r);
}

static void roots_own_socket_is_not_kept_busy_by_users(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, getuid());
    /* more clients than allowed: they wait, are refused, or fill the queue */
    r.shim.client_count += VHPC_CLIENTS_MAX + 64;
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    (void)snprintf(at.sun_path, sizeof at.sun_path, "%s/root.sock", r.dir);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(listener, 8), 0);
    int root = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_int_equal(connect(root, (struct sockaddr *)&at, sizeof at), 0);
    shim_accept(&r.shim, listener);
    say_hello(root, false);
    rig_turn(&r);
    assert_true(hear(root, &got));
    assert_int_equal(got.head.type, getuid() == 0 ? VHPC_HELLO : VHPC_ERROR);
    r.shim.client_count -= VHPC_CLIENTS_MAX + 64;
    (void)close(root);
    (void)close(listener);
    (void)unlink(at.sun_path);
    rig_close(&r);
}

int main(void)
{
    (void)signal(SIGPIPE, SIG_IGN); /* as vhpc-shim does */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_client_that_comes_early_is_told_and_waits),
        cmocka_unit_test(another_user_is_refused),
        cmocka_unit_test(clients_that_do_not_read_share_one_limit),
        cmocka_unit_test(roots_own_socket_is_not_kept_busy_by_users),
        cmocka_unit_test(the_user_may_not_run_as_another_one),
        cmocka_unit_test(control_operations_are_roots),
        cmocka_unit_test(a_bad_client_is_dropped_and_the_others_go_on),
        cmocka_unit_test(data_beyond_the_window_drops_a_client),
        cmocka_unit_test(what_a_client_may_not_say_drops_it),
        cmocka_unit_test(frames_before_hello_is_answered_drop_the_client),
    };
    return cmocka_run_group_tests_name("shim against clients", tests, NULL, NULL);
}
