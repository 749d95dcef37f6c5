/* SPDX-License-Identifier: Apache-2.0 */
/* The nat operation: what is refused, and an interface and a route of this kernel. */
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "nat.h"
#include "own_network.h"

static const struct network_want INTERFACE = {
    .mac = {0x02, 0x76, 0x68, 0x70, 0x63, 0x02},
    .has_mac = true,
    .name = "nat0",
    .mtu = 65520,
    .ipv4 = "10.201.0.2/24",
};
static const struct nat_want GOOD = {
    .gateway = "10.201.0.1", .server = {"192.0.2.53", "192.0.2.54"}, .server_count = 2};

static int applied(const struct nat_want *want, const struct network_want *interface, char *text,
                   size_t size)
{
    const struct agent a = {.system = false};
    return nat_apply(&a, want, interface, text, size);
}

static void a_good_request_is_taken(void **state)
{
    char text[256] = "";
    struct nat_want none = {.gateway = "10.201.0.254"};
    (void)state;
    assert_int_equal(applied(&GOOD, &INTERFACE, text, sizeof text), 0);
    assert_int_equal(applied(&none, &INTERFACE, text, sizeof text), 0);
    assert_string_equal(text, "");
}

static void what_no_gateway_can_be_is_refused(void **state)
{
    static const char *const gateways[] = {"",         "10.201.0.2", "10.201.1.1",
                                           "10.201.0", "fd00:",      "10.201.0.1x"};
    (void)state;
    for (size_t i = 0; i < sizeof gateways / sizeof *gateways; i++) {
        struct nat_want want = GOOD;
        char text[256] = "";
        (void)snprintf(want.gateway, sizeof want.gateway, "%s", gateways[i]);
        assert_int_equal(applied(&want, &INTERFACE, text, sizeof text), -EINVAL);
        assert_non_null(strstr(text, "GATEWAY"));
    }
}

static void what_no_server_can_be_is_refused(void **state)
{
    static const char *const servers[] = {"", "dns", "1.2.3", "1.2.3.4\nsearch"};
    (void)state;
    for (size_t i = 0; i < sizeof servers / sizeof *servers; i++) {
        struct nat_want want = GOOD;
        char text[256] = "";
        (void)snprintf(want.server[1], sizeof want.server[1], "%s", servers[i]);
        assert_int_equal(applied(&want, &INTERFACE, text, sizeof text), -EINVAL);
        assert_non_null(strstr(text, "NAMESERVER"));
    }
}

static void an_interface_is_checked_as_that_of_the_jobs_network(void **state)
{
    struct network_want interface = INTERFACE;
    char text[256] = "";
    (void)state;
    interface.has_mac = false;
    assert_int_equal(applied(&GOOD, &interface, text, sizeof text), -EINVAL);
    assert_non_null(strstr(text, "MAC"));
}

static void more_servers_than_programs_read_are_an_error(void **state)
{
    struct nat_want want = {0};
    const uint8_t address[] = "192.0.2.1", longer[] = "192.168.100.1000";
    struct tlv t = {.tag = TAG_NAMESERVER, .len = sizeof address - 1, .data = address};
    (void)state;
    for (size_t i = 0; i < NAT_SERVERS_MAX; i++)
        assert_int_equal(nat_add_server(&want, &t), 0);
    assert_string_equal(want.server[2], "192.0.2.1");
    assert_int_equal(nat_add_server(&want, &t), -EPROTO);
    want.server_count = 0;
    t = (struct tlv){.tag = TAG_NAMESERVER, .len = sizeof longer - 1, .data = longer};
    assert_int_equal(nat_add_server(&want, &t), -EPROTO);
}

/* Whether this network namespace has a default route by this gateway: proc(5), /proc/net/route. */
static bool has_default_route(const char *interface, uint32_t gateway)
{
    char line[256] = "", wanted[64];
    bool found = false;
    FILE *routes = fopen("/proc/thread-self/net/route", "re");
    assert_non_null(routes);
    int length = snprintf(wanted, sizeof wanted, "%s\t00000000\t%08X\t", interface, htonl(gateway));
    while (fgets(line, sizeof line, routes) != NULL)
        found = found || strncmp(line, wanted, (size_t)length) == 0;
    (void)fclose(routes);
    return found;
}

static bool has_ipv6(const char *interface)
{
    struct ifaddrs *all;
    bool found = false;
    assert_int_equal(getifaddrs(&all), 0);
    for (const struct ifaddrs *one = all; one != NULL; one = one->ifa_next)
        found = found || (one->ifa_addr != NULL && one->ifa_addr->sa_family == AF_INET6 &&
                          strcmp(one->ifa_name, interface) == 0);
    freeifaddrs(all);
    return found;
}

/* In a network namespace of its own, without the file of the servers, which is this machine's. */
static void the_kernel_takes_address_and_route(void **state)
{
    char *const add[] = {"ip",   "link", "add",  "eth0", "address", "02:76:68:70:63:02",
                         "type", "veth", "peer", "name", "other",   NULL};
    char text[256] = "";
    struct nat_want want = {.gateway = "10.201.0.1"};
    const struct agent a = {.system = true};
    struct network_want absent = INTERFACE;
    (void)state;
    enter_own_network();
    run_ip(add);
    for (int i = 0; i < 2; i++) { /* it can be repeated */
        assert_int_equal(nat_apply(&a, &want, &INTERFACE, text, sizeof text), 0);
        assert_true(has_default_route("nat0", 0x0ac90001));
        assert_false(has_ipv6("nat0"));
    }
    absent.mac[5] = 9;
    assert_int_equal(nat_apply(&a, &want, &absent, text, sizeof text), -ENODEV);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_good_request_is_taken),
        cmocka_unit_test(what_no_gateway_can_be_is_refused),
        cmocka_unit_test(what_no_server_can_be_is_refused),
        cmocka_unit_test(an_interface_is_checked_as_that_of_the_jobs_network),
        cmocka_unit_test(more_servers_than_programs_read_are_an_error),
        cmocka_unit_test(the_kernel_takes_address_and_route),
    };
    return cmocka_run_group_tests_name("the way out of the guest", tests, NULL, NULL);
}
