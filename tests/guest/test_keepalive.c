/* SPDX-License-Identifier: Apache-2.0 */
/* promise: net.keepalive */
/* Which connections of a cgroup get TCP keepalive: this kernel loads the program and runs it. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <mntent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "keepalive.h"
#include "own_network.h"

static char cgroup[4200];

/* A new cgroup v2 with this process in it, and a network with addresses of a guest. */
static int enter(void **state)
{
    static char *const up[] = {"ip", "link", "set", "lo", "up", NULL};
    static char *const in[] = {"ip", "address", "add", "10.200.0.1/16", "dev", "lo", NULL};
    static char *const in6[] = {"ip",  "address", "add",   "fd76:6870:6300::1/64",
                                "dev", "lo",      "nodad", NULL};
    char procs[4300], number[16];
    (void)state;
    FILE *mounts = setmntent("/proc/self/mounts", "re");
    assert_non_null(mounts);
    for (struct mntent *m; cgroup[0] == '\0' && (m = getmntent(mounts)) != NULL;)
        if (strcmp(m->mnt_type, "cgroup2") == 0)
            (void)snprintf(cgroup, sizeof cgroup, "%s/vhpc-test.%d", m->mnt_dir, (int)getpid());
    (void)endmntent(mounts);
    if (cgroup[0] == '\0' || mkdir(cgroup, 0755) < 0) {
        print_message("no cgroup v2 can be made here: mount one and run it as root\n");
        cgroup[0] = '\0';
        return 0;
    }
    (void)snprintf(procs, sizeof procs, "%s/cgroup.procs", cgroup);
    int fd = open(procs, O_WRONLY | O_CLOEXEC);
    int n = snprintf(number, sizeof number, "%d", (int)getpid());
    assert_int_equal(write(fd, number, (size_t)n), n);
    (void)close(fd);
    enter_own_network();
    run_ip(up);
    run_ip(in);
    run_ip(in6);
    return 0;
}

static int leave(void **state)
{
    char parent[4300];
    (void)state;
    if (cgroup[0] == '\0')
        return 0;
    (void)snprintf(parent, sizeof parent, "%s/../cgroup.procs", cgroup);
    int fd = open(parent, O_WRONLY | O_CLOEXEC);
    int rc = write(fd, "0", 1) == 1 ? rmdir(cgroup) : -1;
    (void)close(fd);
    return rc;
}

static struct sockaddr_in6 address(const char *text, socklen_t *len)
{
    struct sockaddr_in6 in6 = {.sin6_family = AF_INET6};
    struct sockaddr_in in = {.sin_family = AF_INET};
    *len = sizeof in6;
    if (inet_pton(AF_INET6, text, &in6.sin6_addr) == 1)
        return in6;
    assert_int_equal(inet_pton(AF_INET, text, &in.sin_addr), 1);
    *len = sizeof in;
    memcpy(&in6, &in, sizeof in);
    return in6;
}

static int option(int fd, int level, int name)
{
    int value = -1;
    socklen_t len = sizeof value;
    assert_int_equal(getsockopt(fd, level, name, &value, &len), 0);
    return value;
}

/* Linux routes a new IPv6 address, and changes this route, by work items: a moment after the
 * command has ended. */
static int connect_routed(int fd, const struct sockaddr_in6 *a, socklen_t len)
{
    int rc = -1;
    for (int i = 0; i < 500; i++) {
        rc = connect(fd, (const struct sockaddr *)a, len);
        if (rc == 0 || errno != ENETUNREACH)
            break;
        (void)usleep(10000);
    }
    return rc;
}

/* Keepalive of both ends of a connection to this address of the machine; NULL: none. */
static const struct keepalive *kept(const char *text, uint16_t port)
{
    static struct keepalive found;
    socklen_t len;
    struct sockaddr_in6 a = address(text, &len);
    a.sin6_port = htons(port); /* at the same place as sin_port */
    int listener = socket(a.sin6_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&a, len), 0);
    assert_int_equal(listen(listener, 1), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&a, &len), 0);
    int end[2] = {socket(a.sin6_family, SOCK_STREAM | SOCK_CLOEXEC, 0), -1};
    assert_int_equal(connect_routed(end[0], &a, len), 0);
    end[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    int on = option(end[0], SOL_SOCKET, SO_KEEPALIVE);
    found = (struct keepalive){.idle_s = option(end[0], IPPROTO_TCP, TCP_KEEPIDLE),
                               .interval_s = option(end[0], IPPROTO_TCP, TCP_KEEPINTVL),
                               .count = option(end[0], IPPROTO_TCP, TCP_KEEPCNT)};
    assert_int_equal(option(end[1], SOL_SOCKET, SO_KEEPALIVE), on);
    assert_int_equal(option(end[1], IPPROTO_TCP, TCP_KEEPIDLE), found.idle_s);
    assert_int_equal(option(end[1], IPPROTO_TCP, TCP_KEEPINTVL), found.interval_s);
    assert_int_equal(option(end[1], IPPROTO_TCP, TCP_KEEPCNT), found.count);
    (void)close(end[0]);
    (void)close(end[1]);
    (void)close(listener);
    return on != 0 ? &found : NULL;
}

static void expect(const char *text, uint16_t port, const struct keepalive *right)
{
    const struct keepalive *k = kept(text, port);
    assert_int_equal(k != NULL, right != NULL);
    if (right != NULL)
        assert_memory_equal(k, right, sizeof *k);
}

static struct keepalive_network plan(const char *ipv6, uint32_t prefix6)
{
    struct keepalive_network p = {.prefix6 = prefix6};
    assert_int_equal(inet_pton(AF_INET, "10.200.0.9", &p.ipv4), 1);
    assert_int_equal(inet_pton(AF_INET, "255.255.0.0", &p.mask), 1);
    assert_int_equal(inet_pton(AF_INET6, ipv6, &p.ipv6), 1);
    return p;
}

static void connections_of_the_network_get_it_and_no_others(void **state)
{
    static const char *const inside[] = {"10.200.0.1", "fd76:6870:6300::1", "::ffff:10.200.0.1"};
    static const char *const outside[] = {"127.0.0.1", "::1", "::ffff:127.0.0.1"};
    (void)state;
    if (cgroup[0] == '\0')
        skip();
    struct keepalive_network p = plan("fd76:6870:6300::9", 64);
    expect("10.200.0.1", 0, NULL);
    assert_int_equal(keepalive_attach(cgroup, &p), 0);
    for (size_t i = 0; i < sizeof inside / sizeof *inside; i++)
        expect(inside[i], 0, &keepalive_patient);
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++)
        expect(outside[i], 22, NULL); /* ssh within the guest is not ssh between guests */
    expect(inside[0], 2222, &keepalive_patient);
    expect(inside[1], 22, &keepalive_ssh);
    for (size_t i = 0; i < sizeof inside / sizeof *inside; i++)
        expect(inside[i], 0, &keepalive_ssh);
    expect(outside[0], 0, NULL);
}

static void prefixes_of_every_length_are_programs(void **state)
{
    (void)state;
    if (cgroup[0] == '\0')
        skip();
    for (uint32_t bits = 0; bits <= 127; bits++) {
        struct keepalive_network p = plan("fd76:6870:6300::9", bits);
        int rc = keepalive_attach("/nonexistent", &p); /* loaded, before there is no cgroup */
        assert_int_equal(rc, -ENOENT);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(connections_of_the_network_get_it_and_no_others),
        cmocka_unit_test(prefixes_of_every_length_are_programs),
    };
    return cmocka_run_group_tests(tests, enter, leave);
}
