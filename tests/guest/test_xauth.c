/* SPDX-License-Identifier: Apache-2.0 */
/* Authority files of X11, values of DISPLAY, and the kernel's tables of TCP sockets. */
#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "tcptable.h"
#include "xauth.h"

static const uint8_t cookie[XAUTH_COOKIE] = {0xde, 0xad, 0xbe, 0xef, 4,  5,  6,  7,
                                             8,    9,    10,   11,   12, 13, 14, 15};

static void display_is(const char *text, int expected)
{
    uint16_t number = 0;
    bool found = xauth_display(text, &number);
    assert_int_equal(found ? number : -1, expected);
}

static void only_a_number_on_localhost_is_a_display(void **state)
{
    (void)state;
    display_is("localhost:25.0", 25);
    display_is("localhost:99", 99);
    display_is("localhost:65535.12", 65535);
    display_is("localhost:65536.0", -1);
    display_is("localhost:123456789012345678901.0", -1);
    display_is("localhost:", -1);
    display_is("localhost:.0", -1);
    display_is("localhost:25.", -1);
    display_is("localhost:25.0.0", -1);
    display_is("localhost:25x", -1);
    display_is("localhost:-1", -1);
    display_is("localhost", -1);
    display_is(":25.0", -1);
    display_is("unix:25.0", -1);
    display_is("login:25.0", -1);
    display_is("localhost/unix:25.0", -1);
    display_is("SLURM_X11_SETUP_FAILED", -1);
    display_is("", -1);
}

/* Family, address, number, name and data, as `xauth` writes them: od -An -tx1 ~/.Xauthority. */
#define ENTRY_OF_N1                                                                                \
    "\x01\x00\x00\x02n1\x00\x02"                                                                   \
    "25\x00\x12MIT-MAGIC-COOKIE-1\x00\x10\xde\xad\xbe\xef\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d" \
    "\x0e\x0f"
#define ENTRY_OF_LOGIN                                                                             \
    "\x01\x00\x00\x05login\x00\x02"                                                                \
    "25\x00\x12MIT-MAGIC-COOKIE-1\x00\x10................"
#define ENTRY_WILD                                                                                 \
    "\xff\xff\x00\x00\x00\x02"                                                                     \
    "25\x00\x12MIT-MAGIC-COOKIE-1\x00\x10\xde\xad\xbe\xef\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d" \
    "\x0e\x0f"

static bool finds(const char *data, size_t len, const char *host, uint16_t number)
{
    struct x11_display display = {.number = number};
    /* exact size, so that the sanitizer sees a read behind it */
    uint8_t *copy = test_malloc(len + (len == 0));
    memcpy(copy, data, len);
    bool found = xauth_find(copy, len, host, &display);
    test_free(copy);
    if (found)
        assert_memory_equal(display.cookie, cookie, sizeof cookie);
    return found;
}

static void the_cookie_is_of_this_host_and_display(void **state)
{
    static const char both[] = ENTRY_OF_LOGIN ENTRY_OF_N1, wild[] = ENTRY_WILD;
    (void)state;
    assert_true(finds(both, sizeof both - 1, "n1", 25));
    assert_false(finds(both, sizeof both - 1, "n1", 26));
    assert_false(finds(both, sizeof both - 1, "n1", 2));
    assert_false(finds(both, sizeof both - 1, "n", 25));
    assert_false(finds(both, sizeof both - 1, "n11", 25));
    assert_true(finds(wild, sizeof wild - 1, "any", 25));
    assert_false(finds(wild, sizeof wild - 1, "any", 24));
}

static void a_part_of_a_file_has_no_cookie(void **state)
{
    static const char whole[] = ENTRY_OF_N1;
    (void)state;
    for (size_t len = 0; len < sizeof whole - 1; len++)
        assert_false(finds(whole, len, "n1", 25));
    assert_true(finds(whole, sizeof whole - 1, "n1", 25));
}

static void the_guests_entry_is_for_any_name_of_the_host(void **state)
{
    static const char wild[] = ENTRY_WILD;
    struct x11_display display = {.number = 25};
    uint8_t out[XAUTH_ENTRY_MAX];
    (void)state;
    memcpy(display.cookie, cookie, sizeof cookie);
    assert_int_equal(xauth_entry(&display, out), sizeof wild - 1);
    assert_memory_equal(out, wild, sizeof wild - 1);
    display.number = UINT16_MAX;
    assert_true(xauth_entry(&display, out) <= sizeof out);
}

/* From a node of Slurm 24.11: cat /proc/net/tcp /proc/net/tcp6. */
static void a_line_of_the_kernels_table_is_a_socket(void **state)
{
    char listens[] = "   0: 0100007F:1791 00000000:0000 0A 00000000:00000000 00:00000000 00000000  "
                     "2001        0 4711 1 0000000000000000 100 0 0 10 0\n";
    char connected[] = "   1: 0100007F:B0D2 0100007F:1791 01 00000000:00000000 00:00000000 "
                       "00000000     0        0 18446744 1 0000000000000000 20 4 30 10 -1\n";
    char v6[] =
        "  12: 00000000000000000000000001000000:1791 00000000000000000000000000000000:0000 0A "
        "00000000:00000000 00:00000000 00000000  2001        0 81 1 0000000000000000 100\n";
    struct tcp_row row;
    (void)state;
    assert_true(tcptable_line(listens, AF_INET, &row));
    assert_true(row.listens);
    assert_int_equal(ntohl(row.local.in.s_addr), INADDR_LOOPBACK);
    assert_int_equal(row.local_port, 6033);
    assert_int_equal(row.uid, 2001);
    assert_int_equal(row.inode, 4711);
    assert_true(tcptable_line(connected, AF_INET, &row));
    assert_false(row.listens);
    assert_int_equal(row.local_port, 0xb0d2);
    assert_int_equal(row.remote_port, 6033);
    assert_int_equal(row.inode, 18446744);
    assert_true(tcptable_line(v6, AF_INET6, &row));
    assert_true(row.listens);
    assert_memory_equal(&row.local.in6, &in6addr_loopback, sizeof in6addr_loopback);
}

static void another_line_is_no_socket(void **state)
{
    static const char *const wrong[] = {
        "  sl  local_address rem_address   st tx_queue rx_queue tr uid inode",
        "",
        "0: 0100007F:1791",
        "0: 0100007F1791 00000000:0000 0A 0:0 0:0 0 2001 0 4711",
        "0: 0100007F:179100 00000000:0000 0A 0:0 0:0 0 2001 0 4711",
        "0: 000000000100007F:1791 00000000:0000 0A 0:0 0:0 0 2001 0 4711",
        "0: 0100007F:1791 00000000:0000 0A 0:0 0:0 0 -1 0 4711",
        "0: 0100007F:1791 00000000:0000 0A 0:0 0:0 0 2001 0 x",
    };
    struct tcp_row row;
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char line[160];
        (void)snprintf(line, sizeof line, "%s", wrong[i]);
        assert_false(tcptable_line(line, AF_INET, &row));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_a_number_on_localhost_is_a_display),
        cmocka_unit_test(the_cookie_is_of_this_host_and_display),
        cmocka_unit_test(a_part_of_a_file_has_no_cookie),
        cmocka_unit_test(the_guests_entry_is_for_any_name_of_the_host),
        cmocka_unit_test(a_line_of_the_kernels_table_is_a_socket),
        cmocka_unit_test(another_line_is_no_socket),
    };
    return cmocka_run_group_tests_name("xauth", tests, NULL, NULL);
}
