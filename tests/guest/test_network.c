/* SPDX-License-Identifier: Apache-2.0 */
/* The network operation: what is refused, and an interface of this kernel that is configured. */
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "check.h"
#include "network.h"
#include "own_network.h"

static const struct network_want GOOD = {
    .mac = {0x06, 0x00, 0x13, 0x88, 0x00, 0x01},
    .has_mac = true,
    .name = "vhpc0",
    .mtu = 1450,
    .ipv4 = "10.200.0.2/16",
    .ipv6 = "fd76:6870:6300::2/64",
};

static void expect_refusal(const struct network_want *want, const char *says)
{
    struct network_plan plan;
    char text[256] = "";
    assert_int_equal(network_check(want, &plan, text, sizeof text), -EINVAL);
    assert_non_null(strstr(text, says));
}

static void a_good_request_is_taken(void **state)
{
    struct network_plan plan = {0};
    char text[256] = "";
    (void)state;
    assert_int_equal(network_check(&GOOD, &plan, text, sizeof text), 0);
    assert_int_equal(plan.ipv4.s_addr, htonl(0x0ac80002));
    assert_int_equal(plan.mask.s_addr, htonl(0xffff0000));
    assert_int_equal(plan.prefix6, 64);
    assert_int_equal(plan.ipv6.s6_addr[15], 2);
}

static void what_no_interface_can_have_is_refused(void **state)
{
    static const char *const no_ipv4[] = {
        "",           "10.0.0.1",      "10.0.0.1/0", "10.0.0.1/32",
        "10.0.0.1/x", "10.0.0.1/0016", "fd00::1/16", "/16"};
    static const char *const no_ipv6[] = {"", "fd00::1", "fd00::1/0", "fd00::1/128", "10.0.0.1/16"};
    static const char *const no_name[] = {"", "a/b", "..", "a b", "vh%d", "vhpc:0", "Vhpc0"};
    struct network_want want = GOOD;
    (void)state;
    want.has_mac = false;
    expect_refusal(&want, "MAC");
    want = GOOD;
    want.mac[0] = 0x07; /* a group */
    expect_refusal(&want, "MAC");
    want = GOOD;
    memset(want.mac, 0, sizeof want.mac);
    expect_refusal(&want, "MAC");
    for (size_t i = 0; i < 2; i++) {
        want = GOOD;
        want.mtu = i == 0 ? 1279 : 65536;
        expect_refusal(&want, "MTU");
    }
    for (size_t i = 0; i < sizeof no_ipv4 / sizeof *no_ipv4; i++) {
        want = GOOD;
        (void)snprintf(want.ipv4, sizeof want.ipv4, "%s", no_ipv4[i]);
        expect_refusal(&want, "IPV4");
    }
    for (size_t i = 0; i < sizeof no_ipv6 / sizeof *no_ipv6; i++) {
        want = GOOD;
        (void)snprintf(want.ipv6, sizeof want.ipv6, "%s", no_ipv6[i]);
        expect_refusal(&want, "IPV6");
    }
    for (size_t i = 0; i < sizeof no_name / sizeof *no_name; i++) {
        want = GOOD;
        (void)snprintf(want.name, sizeof want.name, "%s", no_name[i]);
        expect_refusal(&want, "INTERFACE");
    }
}

static void programs_learn_the_names_of_the_guests(void **state)
{
    struct agent a = {.system = false};
    struct execspec spec = {0};
    char text[256] = "";
    (void)state;
    assert_int_equal(execspec_add_env(&spec, "VHPC_NODELIST=of,another"), 0);
    assert_int_equal(network_environment(&a, &spec), 0);
    assert_string_equal(execspec_getenv(&spec, "VHPC_NODELIST"), "of,another");
    assert_int_equal(network_apply(&a, &GOOD, "n1,n2-g0", text, sizeof text), 0);
    assert_int_equal(network_environment(&a, &spec), 0);
    assert_string_equal(execspec_getenv(&spec, "VHPC_NODELIST"), "n1,n2-g0");
    assert_ptr_equal(strstr(execspec_getenv(&spec, "VHPC_NODELIST"), "another"), NULL);
    assert_int_equal(network_apply(&a, &GOOD, "n1;reboot", text, sizeof text), -EINVAL);
    assert_string_equal(a.nodelist, "n1,n2-g0");
    assert_int_equal(network_apply(&a, &GOOD, "n1", text, sizeof text), 0);
    assert_string_equal(a.nodelist, "n1");
    execspec_free(&spec);
    free(a.interface);
    free(a.nodelist);
}

/* A program with these variables; returns its environment after network_environment(). */
static struct execspec program(const struct agent *a, char *const *envp)
{
    struct execspec spec = {0};
    for (; *envp != NULL; envp++)
        assert_int_equal(execspec_add_env(&spec, *envp), 0);
    assert_int_equal(network_environment(a, &spec), 0);
    return spec;
}

/* promise: mpi.interface */
static void transports_use_the_jobs_network_unless_the_user_chose(void **state)
{
    static const char *const names[] = {"FI_TCP_IFACE",
                                        "GLOO_SOCKET_IFNAME",
                                        "NCCL_SOCKET_IFNAME",
                                        "OMPI_MCA_btl_tcp_if_include",
                                        "OMPI_MCA_oob_tcp_if_include",
                                        "PRTE_MCA_prte_if_include",
                                        "UCX_NET_DEVICES"};
    struct agent a = {.system = false};
    char text[256] = "", *none[] = {NULL}, *own[] = {"FI_TCP_IFACE=eth7", "UCX_NET_DEVICES=", NULL};
    (void)state;
    struct execspec spec = program(&a, none);
    assert_int_equal(spec.envc, 0);
    assert_int_equal(network_apply(&a, &GOOD, NULL, text, sizeof text), 0);
    spec = program(&a, none);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        assert_string_equal(execspec_getenv(&spec, names[i]), GOOD.name);
    assert_string_equal(execspec_getenv(&spec, "OMPI_MCA_btl_tcp_disable_family"), "6");
    /* mpirun returns 0 if it notices a lost daemon before srun or ssh does */
    assert_null(execspec_getenv(&spec, "PRTE_MCA_oob_tcp_keepalive_time"));
    /* A script removes one and changes another; its steps begin with its environment. */
    execspec_drop_env(&spec, "UCX_NET_DEVICES=");
    execspec_drop_env(&spec, "FI_TCP_IFACE=");
    assert_int_equal(execspec_add_env(&spec, "FI_TCP_IFACE=lo"), 0);
    struct execspec step = program(&a, spec.envp);
    assert_null(execspec_getenv(&step, "UCX_NET_DEVICES"));
    assert_string_equal(execspec_getenv(&step, "FI_TCP_IFACE"), "lo");
    assert_string_equal(execspec_getenv(&step, "PRTE_MCA_prte_if_include"), GOOD.name);
    execspec_free(&step);
    execspec_free(&spec);
    spec = program(&a, own);
    assert_string_equal(execspec_getenv(&spec, "FI_TCP_IFACE"), "eth7");
    assert_string_equal(execspec_getenv(&spec, "UCX_NET_DEVICES"), "");
    assert_string_equal(execspec_getenv(&spec, "OMPI_MCA_btl_tcp_if_include"), GOOD.name);
    execspec_free(&spec);
    free(a.interface);
}

/* Whether vhpc0 has the addresses and is up. */
static bool is_configured(void)
{
    struct ifaddrs *all;
    unsigned found = 0;
    char shown[INET6_ADDRSTRLEN];
    assert_int_equal(getifaddrs(&all), 0);
    for (const struct ifaddrs *one = all; one != NULL; one = one->ifa_next) {
        if (one->ifa_addr == NULL || strcmp(one->ifa_name, "vhpc0") != 0 ||
            (one->ifa_flags & IFF_UP) == 0)
            continue;
        if (one->ifa_addr->sa_family == AF_INET) {
            struct sockaddr_in in;
            memcpy(&in, one->ifa_addr, sizeof in);
            found += in.sin_addr.s_addr == htonl(0x0ac80002) ? 1 : 100;
        } else if (one->ifa_addr->sa_family == AF_INET6) {
            struct sockaddr_in6 in6;
            memcpy(&in6, one->ifa_addr, sizeof in6);
            (void)inet_ntop(AF_INET6, &in6.sin6_addr, shown, sizeof shown);
            found += strcmp(shown, "fd76:6870:6300::2") == 0 ? 1 : 0; /* and a link-local one */
        }
    }
    freeifaddrs(all);
    return found == 2;
}

static void the_interface_with_the_address_is_configured(void **state)
{
    char *const add[] = {"ip",   "link", "add",  "eth0", "address", "06:00:13:88:00:01",
                         "type", "veth", "peer", "name", "other",   NULL};
    char *const up[] = {"ip", "link", "set", "eth0", "up", NULL};
    struct network_plan plan = {0};
    struct network_want want = GOOD;
    struct ifreq request = {.ifr_name = "vhpc0"};
    char text[256] = "";
    (void)state;
    enter_own_network();
    assert_int_equal(network_check(&GOOD, &plan, text, sizeof text), 0);
    assert_int_equal(network_configure(&GOOD, &plan, text, sizeof text), -ENODEV);
    assert_non_null(strstr(text, "does the image have virtio_net?"));
    run_ip(add);
    run_ip(up);                   /* the rename has to take it down first */
    for (int i = 0; i < 2; i++) { /* it can be repeated */
        assert_int_equal(network_configure(&GOOD, &plan, text, sizeof text), 0);
        assert_true(is_configured());
    }
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    assert_true(fd >= 0);
    assert_int_equal(ioctl(fd, SIOCGIFMTU, &request), 0);
    assert_int_equal(request.ifr_mtu, 1450);
    (void)close(fd);
    want.mac[5] = 9;
    assert_int_equal(network_configure(&want, &plan, text, sizeof text), -ENODEV);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_good_request_is_taken),
        cmocka_unit_test(what_no_interface_can_have_is_refused),
        cmocka_unit_test(programs_learn_the_names_of_the_guests),
        cmocka_unit_test(transports_use_the_jobs_network_unless_the_user_chose),
        cmocka_unit_test(the_interface_with_the_address_is_configured),
    };
    return cmocka_run_group_tests_name("the job's network in the guest", tests, NULL, NULL);
}
