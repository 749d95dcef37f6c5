/* SPDX-License-Identifier: Apache-2.0 */
/* promise: fabric.guest-ports */
/*
 * How the agent reads a guest's InfiniBand ports. The trees look like those of mlx5:
 * Documentation/ABI/stable/sysfs-class-infiniband, and drivers/infiniband/core/sysfs.c of Linux
 * 6.12 for the format of each value; tables of 128 entries, a link from the class to the device.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "ibports.h"
#include "textfile.h"

#define GUID_A 0x02cc100000000000ull
#define GUID_B 0x02cc100001000000ull
#define GID_A "fe80:0000:0000:0000:02cc:1000:0000:0000\n"
#define GID_B "fe80:0000:0000:0000:02cc:1000:0100:0000\n"

static char root[64];
static char said[1024];
static struct ib_found found;
static const struct ib_want one = {
    .guid = {GUID_A}, .guid_count = 1, .key = {0x9000, 0x7fff}, .key_count = 2};
static const struct ib_want two = {
    .guid = {GUID_B, GUID_A}, .guid_count = 2, .key = {0x9000, 0x7fff}, .key_count = 2};

static int setup(void **state)
{
    (void)state;
    (void)snprintf(root, sizeof root, "/tmp/vhpc-test-XXXXXX");
    return mkdtemp(root) == NULL ? -1 : 0;
}

static int teardown(void **state)
{
    (void)state;
    return remove_folder(root);
}

/* A path below the root of the tree; missing directories are created. */
static const char *at(const char *format, ...) __attribute__((format(printf, 1, 2)));

static const char *at(const char *format, ...)
{
    static char path[512];
    va_list args;
    int n = snprintf(path, sizeof path, "%s/", root);
    va_start(args, format);
    (void)vsnprintf(path + n, sizeof path - (size_t)n, format, args);
    va_end(args);
    for (char *p = path + n; (p = strchr(p, '/')) != NULL; *p++ = '/') {
        *p = '\0';
        assert_true(mkdir(path, 0755) == 0 || errno == EEXIST);
    }
    return path;
}

static void put(const char *path, const char *value)
{
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    assert_true(fputs(value, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

#define PORT "devices/pci0000:00/0000:00:05.%d/infiniband/mlx5_%d/ports/1/"

/* An adapter with one port: its GID, its keys (the rest of 128 are empty). */
static void put_adapter(int number, const char *gid, const char *const *keys)
{
    char target[96];
    const char *rest = "0x0000\n";
    put(at(PORT "gids/0", number, number), gid);
    put(at(PORT "state", number, number), "4: ACTIVE\n");
    put(at(PORT "phys_state", number, number), "5: LinkUp\n");
    put(at(PORT "link_layer", number, number), "InfiniBand\n");
    for (int i = 0; i < 128; i++) {
        const char *key = keys != NULL && *keys != NULL ? *keys++ : rest;
        put(at(PORT "pkeys/%d", number, number, i), key);
    }
    (void)snprintf(target, sizeof target,
                   "../../devices/pci0000:00/0000:00:05.%d/infiniband/mlx5_%d", number, number);
    assert_int_equal(symlink(target, at("class/infiniband/mlx5_%d", number)), 0);
}

static const char *const right[] = {"0x9000\n", "0x7fff\n", NULL};

static void good(const struct ib_want *want)
{
    if (!ib_check(root, want, &found, said, sizeof said))
        fail_msg("refused: %s", said);
    assert_string_equal(said, "");
}

static void bad(const struct ib_want *want, const char *line)
{
    assert_false(ib_check(root, want, &found, said, sizeof said));
    assert_string_equal(said, line);
}

static void a_port_with_the_job_s_key_and_the_default_one_is_right(void **state)
{
    (void)state;
    put_adapter(0, GID_A, right);
    good(&one);
    assert_int_equal(found.count, 1);
    assert_string_equal(found.port[0].device, "mlx5_0");
    assert_int_equal(found.port[0].number, 1);
    assert_int_equal(found.port[0].index, 0);
}

static void the_place_of_the_key_may_be_any(void **state)
{
    static const char *const keys[] = {"0x7fff\n", "0x0000\n", "0x8000\n", "0x9000\n", NULL};
    (void)state;
    put_adapter(0, GID_A, keys);
    good(&one);
    assert_int_equal(found.port[0].index, 3);
    put(at(PORT "pkeys/3", 0, 0), "0x0000\n");
    put(at(PORT "pkeys/127", 0, 0), "0x9000\n");
    good(&one);
    assert_int_equal(found.port[0].index, 127);
}

static void ports_come_in_the_order_of_their_rails(void **state)
{
    (void)state;
    put_adapter(0, GID_A, right);
    put_adapter(1, GID_B, right);
    good(&two);
    assert_string_equal(found.port[0].device, "mlx5_1");
    assert_string_equal(found.port[1].device, "mlx5_0");
}

static void ports_of_ethernet_are_nobody_s_business(void **state)
{
    (void)state;
    put_adapter(0, GID_A, right);
    put_adapter(1, "fe80:0000:0000:0000:5054:00ff:fe12:3456\n", NULL);
    put(at(PORT "link_layer", 1, 1), "Ethernet\n");
    good(&one);
    assert_string_equal(found.port[0].device, "mlx5_0");
}

static void no_adapter_at_all_makes_one_think_of_drivers(void **state)
{
    (void)state;
    bad(&one, "no InfiniBand adapter (does the image have a driver for it?)");
    (void)at("class/infiniband/x");
    bad(&one, "no InfiniBand adapter (does the image have a driver for it?)");
}

static void a_port_that_is_not_active_is_said_with_its_state(void **state)
{
    static const char *const states[] = {"1: DOWN", "2: INIT", "3: ARMED", "5: ACTIVE_DEFER",
                                         "44: X",   "4",       "",         "ACTIVE",
                                         "4 ACTIVE"};
    char line[128];
    (void)state;
    put_adapter(0, GID_A, right);
    for (size_t i = 0; i < sizeof states / sizeof states[0]; i++) {
        put(at(PORT "state", 0, 0), states[i]);
        (void)snprintf(line, sizeof line, "mlx5_0 port 1 is not active: %s", states[i]);
        bad(&one, line);
    }
    assert_int_equal(unlink(at(PORT "state", 0, 0)), 0);
    bad(&one, "mlx5_0 port 1 is not active: No such file or directory");
}

static void another_guid_is_not_ours(void **state)
{
    (void)state;
    put_adapter(0, GID_B, right);
    bad(&one, "mlx5_0 port 1 has the GUID 0x02cc100001000000, which is not the job's; "
              "there is no port with the GUID 0x02cc100000000000");
    /* Not set up yet. */
    put(at(PORT "gids/0", 0, 0), "fe80:0000:0000:0000:0000:0000:0000:0000\n");
    bad(&one, "mlx5_0 port 1 has the GUID 0x0000000000000000, which is not the job's; "
              "there is no port with the GUID 0x02cc100000000000");
}

static void a_port_beside_the_job_s_is_too_many(void **state)
{
    (void)state;
    put_adapter(0, GID_A, right);
    put_adapter(1, GID_B, right);
    bad(&one, "mlx5_1 port 1 has the GUID 0x02cc100001000000, which is not the job's");
}

static void one_guid_on_two_ports_is_wrong(void **state)
{
    (void)state;
    put_adapter(0, GID_A, right);
    put_adapter(1, GID_A, right);
    assert_false(ib_check(root, &one, &found, said, sizeof said));
    assert_non_null(strstr(said, "port 1 has the GUID of mlx5_"));
}

static void tables_that_are_not_exactly_right_are_shown(void **state)
{
    static const struct {
        const char *keys[5];
        const char *line;
    } wrong[] = {
        {{NULL}, "none"},
        {{"0x7fff\n"}, "0x7fff"}, /* the job's key is still missing */
        {{"0xffff\n"}, "0xffff"}, /* the fabric is open */
        {{"0x9000\n"}, "0x9000"}, /* cannot communicate with the subnet manager */
        {{"0x1000\n", "0x7fff\n"}, "0x1000 0x7fff"}, /* limited only */
        {{"0x9000\n", "0x7fff\n", "0x9001\n"}, "0x9000 0x7fff 0x9001"},
        {{"0x9000\n", "0x7fff\n", "0x0010\n"}, "0x9000 0x7fff 0x0010"},
        {{"0x9000\n", "0xffff\n"}, "0x9000 0xffff"},
        {{"0x9001\n", "0x7fff\n"}, "0x9001 0x7fff"},
    };
    char line[256];
    (void)state;
    put_adapter(0, GID_A, right);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        for (int k = 0; k < 4; k++) {
            const char *key = wrong[i].keys[k];
            put(at(PORT "pkeys/%d", 0, 0, k), key != NULL ? key : "0x0000\n");
            if (key == NULL)
                for (int more = k; more < 4; more++)
                    put(at(PORT "pkeys/%d", 0, 0, more), "0x0000\n");
            if (key == NULL)
                break;
        }
        (void)snprintf(line, sizeof line,
                       "mlx5_0 port 1 has the keys %s, and should have 0x9000 0x7fff",
                       wrong[i].line);
        bad(&one, line);
    }
}

static void a_full_table_of_strangers_is_cut_short(void **state)
{
    char value[16];
    (void)state;
    put_adapter(0, GID_A, right);
    for (int i = 2; i < 128; i++) {
        (void)snprintf(value, sizeof value, "0x%04x\n", 0x9000 + i);
        put(at(PORT "pkeys/%d", 0, 0, i), value);
    }
    bad(&one, "mlx5_0 port 1 has the keys 0x9000 0x7fff 0x9002 0x9003 0x9004 0x9005 0x9006 0x9007 "
              "and 120 more, and should have 0x9000 0x7fff");
}

static void a_key_of_the_site_is_wanted_like_the_others(void **state)
{
    static const char *const keys[] = {"0x9000\n", "0x7fff\n", "0x0010\n", NULL};
    struct ib_want want = one;
    (void)state;
    want.key[want.key_count++] = 0x0010;
    put_adapter(0, GID_A, keys);
    good(&want);
    put(at(PORT "pkeys/2", 0, 0), "0x0000\n");
    bad(&want, "mlx5_0 port 1 has the keys 0x9000 0x7fff, and should have 0x9000 0x7fff 0x0010");
}

static void what_is_no_value_is_refused(void **state)
{
    static const char *const no_gids[] = {"",
                                          "fe80::1\n",
                                          "fe80:0000:0000:0000:02cc:1000:0000\n",
                                          "fe80:0000:0000:0000:02cc:1000:0000:000g\n",
                                          "fe80:0000:0000:0000:02cc:1000:0000:0000:0000\n",
                                          "fe80:0000:0000:0000:02cc:1000:0000:0000\nx\n",
                                          "\xff\xfe\n"};
    static const char *const no_keys[] = {"",         "9000\n", "0x900\n",         "0x90000\n",
                                          "0xgggg\n", "-1\n",   "0x9000\n0x9001\n"};
    (void)state;
    put_adapter(0, GID_A, right);
    for (size_t i = 0; i < sizeof no_gids / sizeof no_gids[0]; i++) {
        put(at(PORT "gids/0", 0, 0), no_gids[i]);
        assert_false(ib_check(root, &one, &found, said, sizeof said));
        assert_memory_equal(said, "mlx5_0 port 1 has no GID: ", 26);
    }
    put(at(PORT "gids/0", 0, 0), GID_A);
    for (size_t i = 0; i < sizeof no_keys / sizeof no_keys[0]; i++) {
        put(at(PORT "pkeys/5", 0, 0), no_keys[i]);
        assert_false(ib_check(root, &one, &found, said, sizeof said));
        assert_memory_equal(said, "mlx5_0 port 1: key 5 is ", 24);
    }
}

static void what_is_missing_is_refused(void **state)
{
    (void)state;
    put_adapter(0, GID_A, right);
    assert_int_equal(unlink(at(PORT "pkeys/64", 0, 0)), 0);
    /* 127 entries, so the last one is also not where it should be */
    bad(&one, "mlx5_0 port 1: key 64 is No such file or directory");
    for (int i = 0; i < 128; i++)
        (void)unlink(at(PORT "pkeys/%d", 0, 0, i));
    bad(&one, "mlx5_0 port 1 has a table of 0 keys");
    assert_int_equal(rmdir(at(PORT "pkeys", 0, 0)), 0);
    bad(&one, "mlx5_0 port 1 has no table of keys");
    assert_int_equal(unlink(at(PORT "gids/0", 0, 0)), 0);
    bad(&one, "mlx5_0 port 1 has no GID: No such file or directory; "
              "there is no port with the GUID 0x02cc100000000000");
}

static void what_is_no_file_does_not_hang_the_agent(void **state)
{
    (void)state;
    put_adapter(0, GID_A, right);
    assert_int_equal(unlink(at(PORT "pkeys/0", 0, 0)), 0);
    assert_int_equal(mkfifo(at(PORT "pkeys/0", 0, 0), 0600), 0);
    bad(&one, "mlx5_0 port 1: key 0 is Input/output error");
    assert_int_equal(mkdir(at("class/infiniband/mlx5_7"), 0700), 0);
    assert_false(ib_check(root, &one, &found, said, sizeof said));
    assert_non_null(strstr(said, "mlx5_7 has no ports"));
}

static void a_name_that_would_break_a_list_is_none(void **state)
{
    (void)state;
    put_adapter(0, GID_A, right);
    assert_int_equal(mkdir(at("class/infiniband/mlx5,0:1"), 0700), 0);
    bad(&one, "an adapter has an invalid name");
}

static void a_line_that_is_too_long_is_cut(void **state)
{
    char text[40];
    (void)state;
    put_adapter(0, GID_B, right);
    put_adapter(1, GID_B, right);
    assert_false(ib_check(root, &one, &found, text, sizeof text));
    assert_true(strlen(text) < sizeof text);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(a_port_with_the_job_s_key_and_the_default_one_is_right),
        TEST(the_place_of_the_key_may_be_any),
        TEST(ports_come_in_the_order_of_their_rails),
        TEST(ports_of_ethernet_are_nobody_s_business),
        TEST(no_adapter_at_all_makes_one_think_of_drivers),
        TEST(a_port_that_is_not_active_is_said_with_its_state),
        TEST(another_guid_is_not_ours),
        TEST(a_port_beside_the_job_s_is_too_many),
        TEST(one_guid_on_two_ports_is_wrong),
        TEST(tables_that_are_not_exactly_right_are_shown),
        TEST(a_full_table_of_strangers_is_cut_short),
        TEST(a_key_of_the_site_is_wanted_like_the_others),
        TEST(what_is_no_value_is_refused),
        TEST(what_is_missing_is_refused),
        TEST(what_is_no_file_does_not_hang_the_agent),
        TEST(a_name_that_would_break_a_list_is_none),
        TEST(a_line_that_is_too_long_is_cut),
    };
    return cmocka_run_group_tests_name("InfiniBand ports", tests, NULL, NULL);
}
