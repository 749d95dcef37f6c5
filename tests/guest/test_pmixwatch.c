/* SPDX-License-Identifier: Apache-2.0 */
/* promise: mpi.refuse */
/*
 * Requests of a program to Slurm's PMIx server, in pieces of every size. Headers and numbers are
 * those of OpenPMIx 3.2 to 6.1 (src/mca/ptl/ptl_types.h, src/include/pmix_globals.h).
 */
#include <arpa/inet.h>
#include <string.h>

#include "check.h"
#include "pmixwatch.h"

/* Bytes that a client has sent so far. */
struct said {
    uint8_t bytes[8192];
    size_t len;
};

static void add(struct said *s, const void *bytes, size_t len)
{
    assert_true(s->len + len <= sizeof s->bytes);
    memcpy(s->bytes + s->len, bytes, len);
    s->len += len;
}

static void add_header(struct said *s, uint32_t from, uint32_t tag, uint32_t length)
{
    uint32_t header[] = {from, tag, length, 0xa5a5a5a5}; /* the padding is not initialized */
    add(s, header, sizeof header);
}

/* The first message has its length in the byte order of the host. */
static struct said greeting(void)
{
    static const char text[] = "native\0\0\0\0\0\0slurm.pmix.42.1\0\0\0\0\0"
                               "4.2.2\0v41";
    struct said s = {0};
    add_header(&s, UINT32_MAX, UINT32_MAX, sizeof text);
    add(&s, text, sizeof text);
    return s;
}

static void request(struct said *s, const void *content, size_t len)
{
    add_header(s, htonl(3), htonl(117), htonl((uint32_t)len));
    add(s, content, len);
}

/* The begin of a request, as libraries write it; the last byte is the number of the command. */
#define BEGINS(command)                                                                            \
    {"\x02" command, 2}, {"\0\0\0\x01" command, 5}, {"\x09\x02\x22" command, 4},                   \
    {                                                                                              \
        "\0\x09\0\0\0\x01\0\x22" command, 9                                                        \
    }

static const struct begin {
    const char *bytes;
    size_t len;
} spawns[] = {BEGINS("\x09")}, publishes[] = {BEGINS("\x06")}, logs[] = {BEGINS("\x10")};

enum { ENCODINGS = sizeof spawns / sizeof *spawns };

static void add_request(struct said *s, const struct begin *begin, const char *rest, size_t len)
{
    char content[4096];
    assert_true(begin->len + len <= sizeof content);
    memcpy(content, begin->bytes, begin->len);
    memcpy(content + begin->len, rest, len);
    request(s, content, begin->len + len);
}

static void finds(const struct said *s, enum pmixwatch_found expected)
{
    for (size_t piece = 1; piece <= s->len; piece++) {
        struct pmixwatch w = {0};
        enum pmixwatch_found found = PMIXWATCH_NOTHING;
        for (size_t at = 0; at < s->len && found == PMIXWATCH_NOTHING; at += piece)
            found = pmixwatch_read(&w, s->bytes + at, s->len - at < piece ? s->len - at : piece);
        assert_int_equal(found, expected);
    }
}

static void usual_requests_pass(void **state)
{
    static const char spawn[] = "\x02\x09";
    char large[3000];
    (void)state;
    memset(large, '\t', sizeof large);
    for (size_t i = 0; i < ENCODINGS; i++) {
        struct said s = greeting();
        request(&s, "", 0);
        add_request(&s, &logs[i], large, sizeof large);
        add_request(&s, &logs[i], spawn, sizeof spawn);
        add_request(&s, &publishes[i], "\x01\x0aservice:1\0value", 17);
        request(&s, "\x02", 1);
        finds(&s, PMIXWATCH_NOTHING);
    }
}

static void a_spawn_is_found(void **state)
{
    static const char app[] = "\x00\x15\x02\x01\x02\x06./ring\0";
    (void)state;
    for (size_t i = 0; i < ENCODINGS; i++) {
        struct said s = greeting();
        add_request(&s, &logs[i], "text", 4);
        add_request(&s, &spawns[i], app, sizeof app);
        finds(&s, PMIXWATCH_SPAWN);
    }
}

/*
 * Bytes of Open MPI 4.1.4 with PMIx 4.2.2 (captured): init, a commit of 200 bytes, a fence, a
 * spawn.
 */
static void a_spawn_of_open_mpi_is_found(void **state)
{
    static const char first[] =
        "native\0\0\0\0\x08\xd1\x07\0\0\xd1\x07\0\0\0slurm.pmix.1000.1\0\0\0\0\0"
        "4.2.2rc2\0v41\0\x01hash\0";
    static const char fence[] = "\x02\x03\x02\x01\x02\x24slurm.pmix.1000.1\0\xfe\xff\xff\xff\x0f";
    static const char spawn[] =
        "\x02\x09\x02\x01\x02\x14pmix.pers\0\x02\x03\x0aompi\0\x02\x01\x02\x1e"
        "./ring.openmpi\0";
    char commit[200] = "\x02\x02\x02\x01\x02\x01\x88\x21\x02\x18"
                       "btl.tcp.4.1";
    struct said s = {0};
    (void)state;
    add_header(&s, UINT32_MAX, UINT32_MAX, sizeof first);
    add(&s, first, sizeof first);
    request(&s, "\x02", 2);
    request(&s, commit, sizeof commit);
    request(&s, fence, sizeof fence);
    finds(&s, PMIXWATCH_NOTHING);
    request(&s, spawn, sizeof spawn);
    finds(&s, PMIXWATCH_SPAWN);
}

/* Open MPI's MPI_Comm_accept and MPI_Comm_connect publish PORT:accept and PORT:connect. */
static void the_ends_of_a_port_are_found(void **state)
{
    static const char accept[] = "\x01\x02\x32"
                                 "2719678465.0:1804289383:accept\0\x06";
    static const char connect[] = "\x01\x02\x34"
                                  "2719678465.0:1804289383:connect\0\x06";
    (void)state;
    for (size_t i = 0; i < ENCODINGS; i++) {
        struct said s = greeting(), other = greeting();
        add_request(&s, &publishes[i], accept, sizeof accept);
        finds(&s, PMIXWATCH_ACCEPT);
        add_request(&other, &publishes[i], connect, sizeof connect);
        finds(&other, PMIXWATCH_CONNECT);
    }
}

/* A greeting of another protocol, or of a PMIx with other headers. */
static void other_protocols_are_not_read(void **state)
{
    static const char http[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    struct said s = {0}, spawn_first = {0};
    (void)state;
    add(&s, http, sizeof http);
    add_request(&s, &spawns[0], "", 0);
    finds(&s, PMIXWATCH_NOTHING);
    add_request(&spawn_first, &spawns[0], "", 0);
    add_request(&spawn_first, &spawns[0], "", 0);
    finds(&spawn_first, PMIXWATCH_NOTHING);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(usual_requests_pass),
        cmocka_unit_test(a_spawn_is_found),
        cmocka_unit_test(a_spawn_of_open_mpi_is_found),
        cmocka_unit_test(the_ends_of_a_port_are_found),
        cmocka_unit_test(other_protocols_are_not_read),
    };
    return cmocka_run_group_tests_name("pmixwatch", tests, NULL, NULL);
}
