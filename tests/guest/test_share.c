/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that shim and client share for a program's output: both ends, and what neither may do. */
#include <errno.h>
#include <sys/mman.h>

#include "front_share.h"
#include "rig_shim.h"

enum { PART = 60000, ROUNDS = 40 }; /* together more than twice the memory */

static struct peer_frame got;
static uint8_t block[VHPC_PAYLOAD_MAX];

static void fill(unsigned seed)
{
    for (size_t i = 0; i < sizeof block; i++) {
        seed = seed * 1103515245u + 12345u;
        block[i] = (uint8_t)(seed >> 16);
    }
}

static void put_credit(int fd, uint32_t n)
{
    uint8_t raw[4];
    put_le32(raw, n);
    say(fd, VHPC_CREDIT, RING_FD, 0, 0, 0, raw, sizeof raw);
}

/* Ask for memory; whether the shim has sent it. */
static bool ask(struct rig *r, int client, struct passed *fds)
{
    uint8_t head[VHPC_HEADER];
    struct frame f;
    say(client, VHPC_SHARE, 0, 0, 0, 0, NULL, 0);
    rig_turn(r);
    if (passfd_read(client, head, sizeof head, fds) != (ssize_t)sizeof head)
        return false;
    assert_int_equal(frame_unpack(head, &f), 0);
    assert_int_equal(f.type, VHPC_SHARE);
    assert_int_equal(fds->count, RING_PARTS);
    return true;
}

static int sharing(struct rig *r, uint32_t session, struct ring *ring)
{
    struct passed fds = {0};
    int client = rig_running(r, session);
    assert_true(ask(r, client, &fds));
    assert_int_equal(ring_map(ring, fds.fd), 0);
    passfd_close(&fds);
    say(client, VHPC_SHARED, 0, 0, 0, 0, NULL, 0);
    rig_turn(r);
    return client;
}

static void output_is_in_the_memory_in_its_order(void **state)
{
    struct rig r;
    struct ring ring;
    (void)state;
    rig_open(&r, getuid());
    int client = sharing(&r, 1, &ring);
    for (unsigned i = 0; i < ROUNDS; i++) {
        fill(i);
        say(r.guest, VHPC_DATA, RING_FD, 0, 1, 0, block, PART);
        say(r.guest, VHPC_DATA, RING_FD, 0, 1, 0, "small", 5);
        say(r.guest, VHPC_DATA, 2, 0, 1, 0, "other", 5);
        rig_turn(&r);
        assert_true(hear(client, &got));
        assert_int_equal(got.head.type, VHPC_SHARED);
        assert_int_equal(get_le32(got.payload), PART);
        assert_memory_equal(ring_next(&ring), block, PART);
        ring_advance(&ring, PART);
        assert_true(hear(client, &got));
        assert_int_equal(got.head.type, VHPC_DATA);
        assert_memory_equal(got.payload, "small", 5);
        assert_true(hear(client, &got));
        assert_int_equal(got.head.fd, 2);
        assert_false(hear(client, &got));
        put_credit(client, PART + 5 + 2 * VHPC_HEADER);
        rig_turn(&r);
        assert_true(hear(r.guest, &got));
    }
    assert_false(r.shim.ended);
    ring_free(&ring);
    (void)close(client);
    rig_close(&r);
}

static void a_payload_that_arrives_in_pieces_is_passed_on_once(void **state)
{
    struct rig r;
    struct ring ring;
    uint8_t head[VHPC_HEADER];
    (void)state;
    fill(1);
    rig_open(&r, getuid());
    int client = sharing(&r, 1, &ring);
    frame_pack(head,
               &(struct frame){.type = VHPC_DATA, .fd = RING_FD, .session = 1, .length = PART});
    for (size_t i = 0; i < sizeof head; i++) {
        assert_int_equal(write(r.guest, head + i, 1), 1);
        rig_turn(&r);
    }
    for (size_t i = 0; i < PART; i += 6000) {
        assert_false(hear(client, &got));
        assert_int_equal(write(r.guest, block + i, 6000), 6000);
        rig_turn(&r);
    }
    assert_true(hear(client, &got));
    assert_int_equal(get_le32(got.payload), PART);
    assert_memory_equal(ring_next(&ring), block, PART);
    ring_free(&ring);
    (void)close(client);
    rig_close(&r);
}

static void data_beyond_the_window_breaks_the_guest(void **state)
{
    struct rig r;
    struct ring ring;
    (void)state;
    rig_open(&r, getuid());
    int client = sharing(&r, 1, &ring);
    for (int i = 0; i < 17; i++) {
        assert_false(r.shim.ended);
        say(r.guest, VHPC_DATA, RING_FD, 0, 1, 0, block, PART);
        rig_turn(&r);
    }
    say(r.guest, VHPC_DATA, RING_FD, 0, 1, 0, block, PART);
    rig_turn(&r);
    assert_true(r.shim.ended && r.shim.status == SHIM_AGENT_BROKEN);
    ring_free(&ring);
    (void)close(client);
    rig_close(&r);
}

/* The guest sends a large frame; the second half of its payload comes later. */
static void say_half(struct rig *r)
{
    uint8_t head[VHPC_HEADER];
    frame_pack(head,
               &(struct frame){.type = VHPC_DATA, .fd = RING_FD, .session = 1, .length = PART});
    assert_int_equal(write(r->guest, head, sizeof head), sizeof head);
    assert_int_equal(write(r->guest, block, PART / 2), PART / 2);
    rig_turn(r);
}

static void a_client_may_end_while_its_memory_is_filled(void **state)
{
    struct rig r;
    struct ring ring;
    (void)state;
    rig_open(&r, getuid());
    int client = sharing(&r, 1, &ring), other = rig_running(&r, 2);
    say_half(&r);
    ring_free(&ring);
    (void)close(client);
    rig_turn(&r);
    assert_int_equal(write(r.guest, block, PART / 2), PART / 2);
    say(r.guest, VHPC_DATA, RING_FD, 0, 2, 0, "more", 4);
    rig_turn(&r);
    assert_true(hear(other, &got));
    assert_memory_equal(got.payload, "more", 4);
    assert_false(r.shim.ended);
    assert_int_equal(r.shim.client_count, 1);
    assert_int_equal(r.shim.ring_count, 0);
    (void)close(other);
    rig_close(&r);
}

static void a_guest_may_end_while_it_fills_memory(void **state)
{
    struct rig r;
    struct ring ring;
    (void)state;
    rig_open(&r, getuid());
    int client = sharing(&r, 1, &ring);
    say_half(&r);
    (void)shutdown(r.guest, SHUT_RDWR);
    rig_turn(&r);
    assert_true(hear(client, &got));
    assert_int_equal(got.head.type, VHPC_ERROR);
    assert_true(hung_up(client));
    assert_int_equal(r.shim.client_count, 0);
    ring_free(&ring);
    (void)close(client);
    rig_close(&r);
}

/* promise: attack.shared-output */
static void a_client_can_neither_write_nor_shrink_it(void **state)
{
    struct rig r;
    struct passed fds = {0};
    (void)state;
    rig_open(&r, getuid());
    int client = rig_running(&r, 1);
    assert_true(ask(&r, client, &fds));
    for (size_t i = 0; i < fds.count; i++) {
        assert_int_equal(ftruncate(fds.fd[i], 0), -1);
        assert_int_equal(write(fds.fd[i], "x", 1), -1);
        assert_int_equal(fallocate(fds.fd[i], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096),
                         -1);
        assert_ptr_equal(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds.fd[i], 0),
                         MAP_FAILED);
    }
    passfd_close(&fds);
    (void)close(client);
    rig_close(&r);
}

/* promise: attack.shared-output */
static void clients_beyond_the_limit_get_their_output_without_it(void **state)
{
    enum { CLIENTS = 66, LIMIT = 64 };
    struct rig r;
    int client[CLIENTS], answered = 0;
    (void)state;
    rig_open(&r, getuid());
    for (uint32_t i = 0; i < CLIENTS; i++) {
        struct passed fds = {0};
        client[i] = rig_running(&r, i + 1);
        answered += ask(&r, client[i], &fds);
        passfd_close(&fds);
    }
    assert_int_equal(answered, LIMIT);
    /* Not the first, which does not say that it has mapped the memory, and not the last. */
    for (uint32_t i = 0; i < CLIENTS; i += CLIENTS - 1) {
        say(r.guest, VHPC_DATA, RING_FD, 0, i + 1, 0, block, PART);
        rig_turn(&r);
        assert_true(hear(client[i], &got));
        assert_int_equal(got.head.type, VHPC_DATA);
        assert_int_equal(got.head.length, PART);
    }
    for (uint32_t i = 0; i < CLIENTS; i++)
        (void)close(client[i]);
    rig_turn(&r);
    assert_int_equal(r.shim.ring_count, 0);
    rig_close(&r);
}

static void v_twice(int c)
{
    say(c, VHPC_SHARE, 0, 0, 0, 0, NULL, 0);
    say(c, VHPC_SHARE, 0, 0, 0, 0, NULL, 0);
}
static void v_unasked(int c)
{
    say(c, VHPC_SHARED, 0, 0, 0, 0, NULL, 0);
}
static void v_payload(int c)
{
    say(c, VHPC_SHARE, 0, 0, 0, 0, "x", 1);
}

static void what_a_client_may_not_say_drops_it(void **state)
{
    void (*const violation[])(int) = {v_twice, v_unasked, v_payload};
    (void)state;
    for (size_t i = 0; i < sizeof violation / sizeof violation[0]; i++)
        rig_drops(violation[i], i);
}

static void a_guest_may_not_speak_of_it(void **state)
{
    (void)state;
    for (int type = VHPC_SHARE; type <= VHPC_SHARED; type++) {
        struct rig r;
        rig_open(&r, getuid());
        int client = rig_running(&r, 1);
        say(r.guest, (uint8_t)type, RING_FD, 0, 1, 0, "\0\1\0\0", 4);
        rig_turn(&r);
        assert_true(r.shim.ended && r.shim.status == SHIM_AGENT_BROKEN);
        (void)close(client);
        rig_close(&r);
    }
}

static void the_clients_end_believes_no_length(void **state)
{
    static const uint32_t wrong[] = {0, VHPC_PAYLOAD_MAX + 1, UINT32_MAX};
    struct front_share s = {.asked = true};
    struct exchange x = {0};
    struct chan chan = {0};
    struct passed fds = {0};
    struct ring theirs;
    uint8_t raw[4];
    (void)state;
    x.chan = &chan;
    struct frame f = {.type = VHPC_SHARED, .fd = RING_FD, .length = 4, .payload = raw};
    put_le32(raw, 5);
    assert_int_equal(front_share_frame(&s, &x, &f), -EPROTO); /* there is no memory */
    assert_int_equal(ring_make(&theirs, fds.fd), 0);
    fds.count = RING_PARTS;
    assert_int_equal(ring_map(&s.ring, fds.fd), 0);
    passfd_close(&fds);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        put_le32(raw, wrong[i]);
        assert_int_equal(front_share_frame(&s, &x, &f), -EPROTO);
    }
    memcpy(ring_next(&theirs), "bytes", 5);
    put_le32(raw, 5);
    assert_int_equal(front_share_frame(&s, &x, &f), 1);
    assert_int_equal(f.type, VHPC_DATA);
    assert_int_equal(f.length, 5);
    assert_memory_equal(f.payload, "bytes", 5);
    ring_free(&theirs);
    ring_free(&s.ring);
}

static void memory_of_another_size_is_not_mapped(void **state)
{
    struct ring ring = {0};
    int fd[RING_PARTS];
    (void)state;
    for (int i = 0; i < RING_PARTS; i++) {
        fd[i] = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        assert_true(fd[i] >= 0);
        assert_int_equal(ftruncate(fd[i], 4096), 0);
        assert_int_equal(fcntl(fd[i], F_ADD_SEALS, F_SEAL_SHRINK), 0);
    }
    assert_int_equal(ring_map(&ring, fd), -EINVAL);
    for (int i = 0; i < RING_PARTS; i++)
        (void)close(fd[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(output_is_in_the_memory_in_its_order),
        cmocka_unit_test(a_payload_that_arrives_in_pieces_is_passed_on_once),
        cmocka_unit_test(data_beyond_the_window_breaks_the_guest),
        cmocka_unit_test(a_client_may_end_while_its_memory_is_filled),
        cmocka_unit_test(a_guest_may_end_while_it_fills_memory),
        cmocka_unit_test(a_client_can_neither_write_nor_shrink_it),
        cmocka_unit_test(clients_beyond_the_limit_get_their_output_without_it),
        cmocka_unit_test(what_a_client_may_not_say_drops_it),
        cmocka_unit_test(a_guest_may_not_speak_of_it),
        cmocka_unit_test(the_clients_end_believes_no_length),
        cmocka_unit_test(memory_of_another_size_is_not_mapped),
    };
    (void)signal(SIGPIPE, SIG_IGN);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
