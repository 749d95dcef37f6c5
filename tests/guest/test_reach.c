/* SPDX-License-Identifier: Apache-2.0 */
/* The reach operation: what is refused, and echo requests through this kernel. */
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "reach.h"

enum { V4 = 0, V6 = 1 };

static struct reach_want wanted(uint32_t size, const char *first, const char *second)
{
    struct reach_want want = {.count = second == NULL ? 1 : 2, .size = size, .wait_ms = 1000};
    (void)snprintf(want.target[0], sizeof want.target[0], "%s", first);
    if (second != NULL)
        (void)snprintf(want.target[1], sizeof want.target[1], "%s", second);
    return want;
}

static void expect_refusal(const struct reach_want *want, const char *says)
{
    struct reach r = {0};
    char text[256] = "";
    assert_int_equal(reach_parse(want, &r, text, sizeof text), -EINVAL);
    assert_non_null(strstr(text, says));
}

static void a_good_request_is_taken(void **state)
{
    struct reach_want want = wanted(1450, "10.200.0.2", "fd76:6870:6300::2");
    struct reach r = {0};
    char text[256] = "";
    (void)state;
    assert_int_equal(reach_parse(&want, &r, text, sizeof text), 0);
    assert_int_equal(r.count, 2);
    assert_int_equal(r.target[0].family, AF_INET);
    assert_int_equal(r.target[0].address.in.sin_addr.s_addr, htonl(0x0ac80002));
    assert_int_equal(r.target[1].family, AF_INET6);
    assert_int_equal(r.target[1].address.in6.sin6_addr.s6_addr[15], 2);
    assert_false(reach_complete(&r));
    reach_describe(&r, text, sizeof text);
    assert_string_equal(text, "10.200.0.2: no answer, fd76:6870:6300::2: no answer");
}

static void what_cannot_be_tested_is_refused(void **state)
{
    static const char *const no_address[] = {"", "n2", "10.200.0.2/16", "10.200.0", "fd76::g"};
    struct reach_want want = wanted(1450, "10.200.0.2", NULL);
    (void)state;
    want.count = 0;
    expect_refusal(&want, "TARGET");
    want = wanted(REACH_SIZE_MIN - 1, "10.200.0.2", NULL);
    expect_refusal(&want, "MTU from 1280");
    want = wanted(REACH_SIZE_MAX + 1, "10.200.0.2", NULL);
    expect_refusal(&want, "MTU from 1280");
    want = wanted(1450, "10.200.0.2", NULL);
    want.wait_ms = REACH_WAIT_MAX_MS + 1;
    expect_refusal(&want, "WAIT_MS");
    for (size_t i = 0; i < sizeof no_address / sizeof *no_address; i++) {
        want = wanted(1450, no_address[i], NULL);
        expect_refusal(&want, "TARGET is not an address");
    }
}

static void a_long_description_is_cut(void **state)
{
    struct reach_want want = {.count = REACH_TARGETS_MAX, .size = 1450};
    struct reach r = {0};
    char text[64];
    (void)state;
    for (size_t i = 0; i < want.count; i++)
        (void)snprintf(want.target[i], sizeof want.target[i], "10.200.0.%zu", i + 1);
    assert_int_equal(reach_parse(&want, &r, text, sizeof text), 0);
    reach_describe(&r, text, sizeof text);
    assert_int_equal(strlen(text), sizeof text - 1);
}

static bool write_setting(const char *path, const char *value)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool done = write(fd, value, strlen(value)) == (ssize_t)strlen(value);
    (void)close(fd);
    return done;
}

static void set_interface(const char *name, bool up, int mtu)
{
    struct ifreq request = {0};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    (void)snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    request.ifr_mtu = mtu;
    assert_int_equal(ioctl(fd, SIOCSIFMTU, &request), 0);
    request.ifr_flags = up ? IFF_UP | IFF_RUNNING : 0;
    assert_int_equal(ioctl(fd, SIOCSIFFLAGS, &request), 0);
    (void)close(fd);
}

/* The report about the targets after a second of requests; empty: all have answered. */
static void run(const struct reach_want *want, char *text, size_t size)
{
    struct reach r = {0};
    assert_int_equal(reach_parse(want, &r, text, size), 0);
    assert_int_equal(reach_open(&r, text, size), 0);
    for (int i = 0; i < 10 && !reach_complete(&r); i++) {
        struct pollfd poll_fd[2] = {{.fd = r.source[V4].fd, .events = POLLIN},
                                    {.fd = r.source[V6].fd, .events = POLLIN}};
        reach_send(&r);
        assert_true(poll(poll_fd, 2, 100) >= 0);
        for (size_t k = 0; k < 2; k++)
            if (r.source[k].fd >= 0)
                reach_receive(&r, k);
    }
    reach_describe(&r, text, size);
    assert_int_equal(reach_complete(&r), text[0] == '\0');
    reach_close(&r, NULL);
}

/* promise: net.barrier */
static void only_answers_of_full_size_count(void **state)
{
    struct reach_want want = wanted(1450, "127.0.0.1", "::1");
    char text[256] = "";
    (void)state;
    if (unshare(CLONE_NEWNET) < 0 ||
        !write_setting("/proc/sys/net/ipv4/ping_group_range", "0 2147483647")) {
        print_message("network namespaces are root's to make: run it as root\n");
        skip();
    }
    set_interface("lo", true, 65536);
    run(&want, text, sizeof text);
    assert_string_equal(text, "");
    want.size = REACH_SIZE_MAX;
    run(&want, text, sizeof text);
    assert_string_equal(text, "");
    want.size = 1450; /* an interface that has no room for the packet */
    set_interface("lo", true, 1449);
    run(&want, text, sizeof text);
    assert_string_equal(text, "127.0.0.1: Message too long, ::1: Message too long");
    set_interface("lo", true, 1450);
    run(&want, text, sizeof text);
    assert_string_equal(text, "");
    assert_true(write_setting("/proc/sys/net/ipv4/icmp_echo_ignore_all", "1"));
    run(&want, text, sizeof text);
    assert_string_equal(text, "127.0.0.1: no answer");
    want = wanted(1450, "192.0.2.1", "::1");
    run(&want, text, sizeof text);
    assert_string_equal(text, "192.0.2.1: Network is unreachable");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_good_request_is_taken),
        cmocka_unit_test(what_cannot_be_tested_is_refused),
        cmocka_unit_test(a_long_description_is_cut),
        cmocka_unit_test(only_answers_of_full_size_count),
    };
    return cmocka_run_group_tests_name("whether other guests are reached", tests, NULL, NULL);
}
