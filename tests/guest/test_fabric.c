/* SPDX-License-Identifier: Apache-2.0 */
/* promise: fabric.address, fabric.environment */
/* Variables of programs for the job's ports, and which value wins. */
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "fabric.h"
#include "own_network.h"

static struct fabric fabric;
static struct execspec spec;

static int setup(void **state)
{
    (void)state;
    fabric = (struct fabric){
        .want = {.key = {0x9012, 0x7fff}, .key_count = 2},
        .found = {.port = {{.device = "mlx5_1", .number = 1, .index = 0},
                           {.device = "mlx5_0", .number = 2, .index = 0}},
                  .count = 2},
    };
    spec = (struct execspec){0};
    return fabric_name(&fabric);
}

static int teardown(void **state)
{
    (void)state;
    execspec_free(&spec);
    for (size_t i = 0; i < FABRIC_VARIABLES; i++)
        free(fabric.value[i]);
    return 0;
}

static void expect(const char *name, const char *value)
{
    const char *got = execspec_getenv(&spec, name);
    if (value == NULL)
        assert_null(got);
    else if (got == NULL)
        fail_msg("%s is not there", name);
    else
        assert_string_equal(got, value);
}

static void programs_learn_the_key_and_the_ports(void **state)
{
    (void)state;
    assert_int_equal(fabric_environment(&fabric, &spec), 0);
    expect("VHPC_PKEY", "0x1012");
    expect("UCX_IB_PKEY", "0x1012");
    expect("OMPI_MCA_btl_openib_pkey", "0x1012");
    expect("UCX_NET_DEVICES", "mlx5_1:1,mlx5_0:2");
    expect("NCCL_IB_HCA", "=mlx5_1:1,mlx5_0:2");
    expect("NCCL_IB_PKEY", "0");
}

static void the_index_is_left_out_where_ports_differ_in_it(void **state)
{
    (void)state;
    fabric.found.port[1].index = 3;
    assert_int_equal(fabric_name(&fabric), 0);
    assert_int_equal(fabric_environment(&fabric, &spec), 0);
    expect("NCCL_IB_PKEY", NULL);
    expect("UCX_IB_PKEY", "0x1012");
}

static void a_value_of_the_user_s_own_stays(void **state)
{
    (void)state;
    assert_int_equal(execspec_add_env(&spec, "UCX_NET_DEVICES=all"), 0);
    assert_int_equal(execspec_add_env(&spec, "NCCL_IB_HCA="), 0);
    assert_int_equal(execspec_add_env(&spec, "VHPC_PKEY=0x7fff"), 0);
    assert_int_equal(fabric_environment(&fabric, &spec), 0);
    expect("UCX_NET_DEVICES", "all");
    expect("NCCL_IB_HCA", "");
    expect("UCX_IB_PKEY", "0x1012");
    expect("VHPC_PKEY", "0x1012"); /* the user may not set this one */
}

/* srun passes a script's environment to tasks in other guests, where devices have other names. */
static void what_another_guest_s_agent_has_put_there_is_replaced(void **state)
{
    (void)state;
    assert_int_equal(fabric_environment(&fabric, &spec), 0);
    (void)snprintf(fabric.found.port[0].device, IB_DEVICE_MAX, "ibp5s0");
    fabric.found.count = 1;
    fabric.found.port[0].index = 7;
    assert_int_equal(fabric_name(&fabric), 0);
    assert_int_equal(fabric_environment(&fabric, &spec), 0);
    expect("UCX_NET_DEVICES", "ibp5s0:1");
    expect("NCCL_IB_HCA", "=ibp5s0:1");
    expect("NCCL_IB_PKEY", "7");
    for (size_t i = 0, seen = 0; i < spec.envc; i++) {
        seen += strncmp(spec.envp[i], "NCCL_IB_HCA=", 12) == 0 ? 1 : 0;
        assert_true(seen <= 1);
    }
}

static void what_the_script_has_changed_or_taken_away_is_its_will(void **state)
{
    (void)state;
    assert_int_equal(fabric_environment(&fabric, &spec), 0);
    execspec_drop_env(&spec, "UCX_NET_DEVICES=");
    execspec_drop_env(&spec, "NCCL_IB_PKEY=");
    assert_int_equal(execspec_add_env(&spec, "NCCL_IB_PKEY=5"), 0);
    assert_int_equal(fabric_environment(&fabric, &spec), 0);
    expect("UCX_NET_DEVICES", NULL);
    expect("NCCL_IB_PKEY", "5");
    /* and also in a step of the step */
    assert_int_equal(fabric_environment(&fabric, &spec), 0);
    expect("UCX_NET_DEVICES", NULL);
    expect("NCCL_IB_PKEY", "5");
}

static void a_mark_that_is_none_counts_for_nothing(void **state)
{
    (void)state;
    assert_int_equal(execspec_add_env(&spec, "VHPC_FABRIC=  NCCL_IB_PKEY NCCL_IB_PKEYS=1 =x "), 0);
    assert_int_equal(execspec_add_env(&spec, "NCCL_IB_PKEY=1"), 0);
    assert_int_equal(fabric_environment(&fabric, &spec), 0);
    expect("NCCL_IB_PKEY", "1");
}

static void an_address_has_a_prefix(void **state)
{
    uint32_t address = 0, mask = 0;
    (void)state;
    assert_int_equal(ipoib_parse("10.128.1.2/12", &address, &mask), 0);
    assert_int_equal(address, htonl(0x0a800102));
    assert_int_equal(mask, htonl(0xfff00000));
    assert_int_equal(ipoib_parse("192.168.0.9/1", &address, &mask), 0);
    assert_int_equal(mask, htonl(0x80000000));
    assert_int_equal(ipoib_parse("192.168.100.199/31", &address, &mask), 0);
    assert_int_equal(mask, htonl(0xfffffffe));
    static const char *const none[] = {"",           "/",           "10.0.0.1",     "10.0.0.1/0",
                                       "/8",         "10.0.0.1/33", "10.0.0.1/-1",  "10.0.0.1/ 8",
                                       "1.2.3/8",    "1.2.3.4.5/8", "10.0.0.1/008", "fd00::1/8",
                                       "10.0.0.1//8"};
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++)
        if (ipoib_parse(none[i], &address, &mask) != -EINVAL)
            fail_msg("%s was taken", none[i]);
}

/*
 * An interface of this kernel that is down; only ib_ipoib creates one of type InfiniBand, for an
 * adapter.
 */
static void an_interface_gets_the_address_and_comes_up(void **state)
{
    char *const add[] = {"ip",   "link", "add",  "ib0.9000", "type",
                         "veth", "peer", "name", "other",    NULL};
    char text[256] = "";
    struct ifaddrs *all, *one;
    struct sockaddr_in address = {0}, mask = {0};
    unsigned flags = 0;
    (void)state;
    enter_own_network();
    run_ip(add);
    assert_int_equal(
        ipoib_bring_up("ib0.9000", htonl(0x0a800102), htonl(0xfff00000), text, sizeof text), 0);
    assert_int_equal(getifaddrs(&all), 0);
    for (one = all; one != NULL; one = one->ifa_next) {
        if (one->ifa_addr == NULL || one->ifa_addr->sa_family != AF_INET ||
            strcmp(one->ifa_name, "ib0.9000") != 0)
            continue;
        memcpy(&address, one->ifa_addr, sizeof address);
        memcpy(&mask, one->ifa_netmask, sizeof mask);
        flags = one->ifa_flags;
    }
    freeifaddrs(all);
    assert_int_equal(address.sin_addr.s_addr, htonl(0x0a800102));
    assert_int_equal(mask.sin_addr.s_addr, htonl(0xfff00000));
    assert_true((flags & IFF_UP) != 0);
    assert_int_equal(ipoib_bring_up("ib9", htonl(0x0a800103), htonl(0xfff00000), text, sizeof text),
                     -ENODEV);
    assert_string_equal(text, "cannot give ib9 its address: No such device");
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(programs_learn_the_key_and_the_ports),
        TEST(the_index_is_left_out_where_ports_differ_in_it),
        TEST(a_value_of_the_user_s_own_stays),
        TEST(what_another_guest_s_agent_has_put_there_is_replaced),
        TEST(what_the_script_has_changed_or_taken_away_is_its_will),
        TEST(a_mark_that_is_none_counts_for_nothing),
        cmocka_unit_test(an_address_has_a_prefix),
        cmocka_unit_test(an_interface_gets_the_address_and_comes_up),
    };
    return cmocka_run_group_tests_name("the job's ports", tests, NULL, NULL);
}
