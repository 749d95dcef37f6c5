/* SPDX-License-Identifier: Apache-2.0 */
/* promise: shares.locks */
/* Locks on files of shared folders: messages, ranges and mounts. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "check.h"
#include "file.h"
#include "map.h"
#include "mounts.h"

/* --- messages ------------------------------------------------------------------------ */

static void a_request_is_read_as_it_was_written(void **state)
{
    (void)state;
    uint8_t wire[LOCKS_REQUEST + LOCKS_TEXT_MAX];
    const struct locks_request sent = {.id = 7,
                                       .op = LOCKS_SET,
                                       .kind = LOCKS_FLOCK,
                                       .mode = LOCKS_EXCLUSIVE,
                                       .file = 4095,
                                       .inode = UINT64_MAX,
                                       .start = 1,
                                       .end = LOCKS_END,
                                       .tag = "home0",
                                       .path = "a folder/f"};
    struct locks_request got;
    size_t len = locks_pack_request(wire, &sent);
    assert_int_equal(len, LOCKS_REQUEST + 6 + 11);
    for (size_t part = 0; part < len; part++)
        assert_int_equal(locks_unpack_request(wire, part, &got), 0);
    assert_int_equal(locks_unpack_request(wire, len, &got), len);
    assert_string_equal(got.tag, "home0");
    assert_string_equal(got.path, "a folder/f");
    got.tag = sent.tag;
    got.path = sent.path;
    assert_memory_equal(&got, &sent, sizeof sent);
}

static void malformed_requests_are_refused(void **state)
{
    (void)state;
    static const struct {
        size_t at;
        uint8_t byte;
    } faults[] = {{0, 39},    {3, 1},     {8, 0},
                  {8, 5},     {9, 2},     {10, 3},
                  {11, 1},    {13, 0x10}, {LOCKS_REQUEST + 1, 'x'},
                  {39, 0x80}, {24, 99},   {LOCKS_REQUEST + 3, 'x'}};
    const struct locks_request good = {
        .op = LOCKS_SET, .mode = 1, .start = 1, .end = 5, .tag = "t", .path = "p"};
    struct locks_request got;
    uint8_t wire[LOCKS_REQUEST + LOCKS_TEXT_MAX];
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        size_t len = locks_pack_request(wire, &good);
        assert_int_equal(locks_unpack_request(wire, len, &got), len);
        wire[faults[i].at] = faults[i].byte;
        assert_int_equal(locks_unpack_request(wire, sizeof wire, &got), -EPROTO);
    }
}

/* --- ranges -------------------------------------------------------------------------- */

enum { BYTES = 40 };

static void maps_are_equal(const struct locks_map *m, const uint8_t model[BYTES])
{
    for (uint64_t at = 0; at < BYTES;) {
        struct locks_range part = locks_map_next(m, at, BYTES - 1);
        assert_int_equal(part.start, at);
        for (; at <= part.end; at++)
            assert_int_equal(model[at], part.mode);
        assert_true(at == BYTES || model[at] != part.mode); /* the longest one */
    }
    for (size_t i = 1; i < m->count; i++)
        assert_true(m->range[i - 1].end < m->range[i].start);
}

static void a_map_has_the_modes_of_single_bytes(void **state)
{
    (void)state;
    struct locks_map map = {0};
    uint8_t model[BYTES] = {0};
    srandom(20261127);
    for (int round = 0; round < 20000; round++) {
        uint64_t a = (uint64_t)random() % BYTES, b = (uint64_t)random() % BYTES;
        struct locks_range r = {a < b ? a : b, a < b ? b : a, (uint8_t)(random() % 3)};
        bool raise = random() % 2 == 0;
        assert_int_equal(raise ? locks_map_raise(&map, r) : locks_map_set(&map, r), 0);
        for (uint64_t at = r.start; at <= r.end; at++)
            if (!raise || model[at] < r.mode)
                model[at] = r.mode;
        maps_are_equal(&map, model);
    }
    locks_map_free(&map);
}

static void a_map_reaches_to_the_last_byte(void **state)
{
    (void)state;
    struct locks_map map = {0};
    assert_int_equal(locks_map_set(&map, (struct locks_range){0, LOCKS_END, LOCKS_SHARED}), 0);
    assert_int_equal(locks_map_raise(&map, (struct locks_range){5, LOCKS_END, LOCKS_EXCLUSIVE}), 0);
    assert_int_equal(map.count, 2);
    assert_int_equal(locks_map_next(&map, 0, LOCKS_END).end, 4);
    assert_int_equal(locks_map_next(&map, 5, LOCKS_END).end, LOCKS_END);
    locks_map_free(&map);
}

/* --- mounts -------------------------------------------------------------------------- */

static const char table[] =
    "21 1 0:18 / / rw - overlay overlay rw\n"
    "30 21 0:40 / /home/alice rw,nosuid,nodev shared:1 - virtiofs home0 rw\n"
    "31 30 0:41 / /home/alice/sub rw - virtiofs none rw\n"
    "32 30 0:42 / /home/alice/own rw - virtiofs workdir1 rw\n"
    "33 21 0:40 /data/a\\040b /data rw - virtiofs home0 rw\n"
    "34 21 0:50 / /tmp rw - tmpfs tmpfs rw\n"
    "35 35 0:51 / /root rw - virtiofs none rw\n" /* a namespace's root is its own parent */
    "x 21 0:52 / /broken rw - virtiofs home0 rw\n"
    "36x 21 0:53 / /broken rw - virtiofs home0 rw\n"
    "broken\n";

static void located(const struct mounts *m, int id, const char *path, const char *expected)
{
    char out[64];
    int rc = mounts_locate(m, id, path, out, sizeof out);
    assert_string_equal(rc == 0 ? out : "none", expected);
}

static void a_file_is_located_in_its_share(void **state)
{
    (void)state;
    char name[] = "/tmp/vhpc-mounts-XXXXXX";
    struct mounts m;
    int fd = mkstemp(name);
    assert_int_equal(write_all(fd, table, sizeof table - 1), 0);
    (void)close(fd);
    assert_int_equal(mounts_read(&m, name), 0);
    (void)unlink(name);
    located(&m, 30, "/home/alice/x/y", "x/y");
    located(&m, 30, "/home/alice", ".");
    located(&m, 30, "/home/alicex", "none");
    located(&m, 31, "/home/alice/sub/z", "sub/z");
    located(&m, 32, "/home/alice/own/z", "z");
    located(&m, 33, "/data/c", "data/a b/c");
    located(&m, 33, "/data", "data/a b");
    located(&m, 34, "/tmp/x", "none");
    located(&m, 35, "/root/x", "none");
    located(&m, 99, "/tmp/x", "none");
    assert_string_equal(mounts_tag(&m, makedev(0, 41)), "home0");
    assert_string_equal(mounts_tag(&m, makedev(0, 42)), "workdir1");
    assert_null(mounts_tag(&m, makedev(0, 50)));
    assert_null(mounts_tag(&m, makedev(0, 51)));
    assert_null(mounts_tag(&m, makedev(0, 52)));
    mounts_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_is_read_as_it_was_written),
        cmocka_unit_test(malformed_requests_are_refused),
        cmocka_unit_test(a_map_has_the_modes_of_single_bytes),
        cmocka_unit_test(a_map_reaches_to_the_last_byte),
        cmocka_unit_test(a_file_is_located_in_its_share),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
