/* SPDX-License-Identifier: Apache-2.0 */
/* Channels of `vhpc forward`: what the host may send, and how much is kept. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "forward.h"
#include "frame.h"

static struct forward f;
static int program = -1; /* the other end of the last connection */
static int earlier[FORWARD_CHANNELS];
static size_t count;

/* Each connection is a socket pair; its end is `program`. */
static int dial(const struct forward *unused, unsigned try)
{
    int ends[2];
    (void)unused;
    if (try > 0)
        return -ENOENT;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    if (program >= 0 && count < FORWARD_CHANNELS)
        earlier[count++] = program;
    program = ends[1];
    return ends[0];
}

static int refuse(const struct forward *unused, unsigned try)
{
    (void)unused;
    return try == 0 ? -ECONNREFUSED : -ENOENT;
}

static int begin(void **state)
{
    (void)state;
    memset(&f, 0, sizeof f);
    f.dial = dial;
    return 0;
}

static int finish(void **state)
{
    (void)state;
    forward_free(&f);
    if (program >= 0)
        (void)close(program);
    while (count > 0)
        (void)close(earlier[--count]);
    program = -1;
    return 0;
}

static int give(uint8_t type, uint32_t channel, const void *data, size_t len)
{
    uint8_t raw[FORWARD_FRAME_MAX];
    struct forward_frame frame = {
        .type = type, .length = (uint16_t)len, .channel = channel, .payload = data};
    return forward_feed(&f, raw, forward_pack(raw, &frame));
}

static int give_number(uint8_t type, uint32_t channel, uint32_t number)
{
    uint8_t raw[4];
    put_le32(raw, number);
    return give(type, channel, raw, sizeof raw);
}

/* The next frame for the host. */
static struct forward_frame answer(void)
{
    static uint8_t kept[FORWARD_FRAME_MAX];
    struct forward_frame frame = {0};
    int n = 0;
    for (int turns = 0; turns < 3 && n == 0; turns++) {
        if (f.out.len > 0)
            n = forward_unpack(buf_head(&f.out), (uint32_t)f.out.len, &frame);
        if (n == 0)
            assert_int_equal(loop_once(&f.loop, 20), 0);
    }
    assert_true(n >= 0);
    if (n == 0)
        return (struct forward_frame){.payload = kept};
    memcpy(kept, buf_head(&f.out), (size_t)n);
    buf_consume(&f.out, (size_t)n);
    frame.payload = kept + FORWARD_HEADER;
    return frame;
}

static void open_one(uint32_t channel)
{
    assert_int_equal(give(FORWARD_OPEN, channel, NULL, 0), 0);
    struct forward_frame frame = answer();
    assert_int_equal(frame.type, FORWARD_OPENED);
    assert_int_equal(frame.channel, channel);
}

static void bytes_pass_and_each_direction_ends_by_itself(void **state)
{
    char text[16] = "";
    (void)state;
    assert_int_equal(give(FORWARD_OPEN, 1, NULL, 0), 0);
    assert_int_equal(give(FORWARD_DATA, 1, "early", 5), 0); /* before it is connected */
    assert_int_equal(answer().type, FORWARD_OPENED);
    assert_int_equal(read(program, text, sizeof text), 5);
    assert_memory_equal(text, "early", 5);
    assert_int_equal(give(FORWARD_EOF, 1, NULL, 0), 0);
    assert_int_equal(read(program, text, sizeof text), 0);
    assert_int_equal(write(program, "late", 4), 4);
    struct forward_frame frame = answer();
    assert_int_equal(frame.type, FORWARD_DATA);
    assert_int_equal(frame.length, 4);
    assert_memory_equal(frame.payload, "late", 4);
    assert_int_equal(shutdown(program, SHUT_WR), 0);
    assert_int_equal(answer().type, FORWARD_EOF);
    assert_int_equal(f.channel[0].id, 0);
    /* what was on its way to an ended channel */
    assert_int_equal(give_number(FORWARD_CREDIT, 1, 4), 0);
    assert_int_equal(give_number(FORWARD_CLOSE, 1, 0), 0);
}

static void frames_may_come_in_pieces(void **state)
{
    const uint8_t open[] = {FORWARD_OPEN, 0, 0, 0, 9, 0, 0, 0, '\n'};
    (void)state;
    for (size_t i = 0; i < sizeof open; i++)
        assert_int_equal(forward_feed(&f, open + i, 1), 0);
    assert_int_equal(answer().channel, 9);
}

static void the_host_gets_credit_for_what_the_program_takes(void **state)
{
    static uint8_t data[FORWARD_DATA_MAX], taken[FORWARD_WINDOW];
    size_t sum = 0;
    (void)state;
    open_one(1);
    for (int i = 0; i < FORWARD_WINDOW / FORWARD_DATA_MAX; i++)
        assert_int_equal(give(FORWARD_DATA, 1, data, sizeof data), 0);
    assert_int_equal(fcntl(program, F_SETFL, O_NONBLOCK), 0);
    for (int turns = 0; turns < 100 && sum < FORWARD_WINDOW; turns++) {
        ssize_t n = read(program, taken, sizeof taken);
        sum += n > 0 ? (size_t)n : 0;
        assert_int_equal(loop_once(&f.loop, 10), 0);
    }
    assert_int_equal(sum, FORWARD_WINDOW);
    for (sum = 0; sum < FORWARD_WINDOW;) {
        struct forward_frame frame = answer();
        assert_int_equal(frame.type, FORWARD_CREDIT);
        sum += get_le32(frame.payload);
    }
    assert_int_equal(sum, FORWARD_WINDOW);
}

static void a_program_that_does_not_read_bounds_what_is_kept(void **state)
{
    static uint8_t data[FORWARD_DATA_MAX];
    int rc = 0, frames = 0;
    (void)state;
    open_one(1);
    while (rc == 0 && frames++ < 1000) {
        rc = give(FORWARD_DATA, 1, data, sizeof data);
        assert_true(f.channel[0].in.len <= FORWARD_WINDOW);
    }
    assert_int_equal(rc, -EPROTO);
    assert_string_equal(f.why, "more data than was allowed");
}

static void the_program_is_read_as_far_as_the_host_allows(void **state)
{
    static uint8_t data[65536];
    size_t got = 0;
    (void)state;
    open_one(1);
    assert_int_equal(fcntl(program, F_SETFL, O_NONBLOCK), 0);
    for (int turns = 0; turns < 50; turns++) {
        (void)!write(program, data, sizeof data);
        assert_int_equal(loop_once(&f.loop, 10), 0);
    }
    for (struct forward_frame frame; (frame = answer()).type == FORWARD_DATA;)
        got += frame.length;
    assert_int_equal(got, FORWARD_WINDOW);
    assert_int_equal(give_number(FORWARD_CREDIT, 1, 100), 0);
    assert_int_equal(answer().length, 100);
    assert_int_equal(give_number(FORWARD_CREDIT, 1, FORWARD_WINDOW + 1), -EPROTO);
}

static void a_reset_of_either_side_closes_the_channel(void **state)
{
    char byte;
    (void)state;
    open_one(1);
    assert_int_equal(give_number(FORWARD_CLOSE, 1, ECONNRESET), 0);
    assert_int_equal(read(program, &byte, 1), 0);
    assert_int_equal(f.channel[0].id, 0);
    open_one(2);
    (void)close(program);
    program = -1;
    assert_int_equal(answer().type, FORWARD_EOF);
    assert_int_equal(give(FORWARD_DATA, 2, "x", 1), 0);
    struct forward_frame frame = answer();
    assert_int_equal(frame.type, FORWARD_CLOSE);
    assert_int_equal(get_le32(frame.payload), EPIPE);
}

static void a_port_without_a_server_is_the_end_of_its_channel(void **state)
{
    (void)state;
    f.dial = refuse;
    assert_int_equal(give(FORWARD_OPEN, 1, NULL, 0), 0);
    struct forward_frame frame = answer();
    assert_int_equal(frame.type, FORWARD_CLOSE);
    assert_int_equal(get_le32(frame.payload), ECONNREFUSED);
}

static void there_are_so_many_channels_and_no_more(void **state)
{
    (void)state;
    for (uint32_t i = 1; i <= FORWARD_CHANNELS; i++)
        open_one(i);
    assert_int_equal(give(FORWARD_OPEN, FORWARD_CHANNELS + 1, NULL, 0), 0);
    struct forward_frame frame = answer();
    assert_int_equal(frame.type, FORWARD_CLOSE);
    assert_int_equal(get_le32(frame.payload), EMFILE);
    assert_int_equal(give_number(FORWARD_CLOSE, 5, 0), 0);
    open_one(FORWARD_CHANNELS + 2);
}

static void what_the_protocol_does_not_permit_is_refused(void **state)
{
    static const struct {
        uint8_t raw[16];
        size_t len;
    } bad[] = {
        {{0, 0, 0, 0, 1, 0, 0, 0, '\n'}, 9},
        {{FORWARD_TYPES, 0, 0, 0, 1, 0, 0, 0, '\n'}, 9},
        {{FORWARD_OPEN, 1, 0, 0, 1, 0, 0, 0, '\n'}, 9},
        {{FORWARD_OPEN, 0, 0, 0, 0, 0, 0, 0, '\n'}, 9},
        {{FORWARD_OPEN, 0, 0, 0, 1, 0, 0, 0, 0}, 9},
        {{FORWARD_OPEN, 0, 1, 0, 1, 0, 0, 0, 'x', '\n'}, 10},
        {{FORWARD_DATA, 0, 0, 0, 1, 0, 0, 0, '\n'}, 9},
        {{FORWARD_DATA, 0, 1, 0x40, 1, 0, 0, 0}, 8},
        {{FORWARD_CREDIT, 0, 3, 0, 1, 0, 0, 0}, 8},
        {{FORWARD_DATA, 0, 1, 0, 1, 0, 0, 0, 'x', '\n'}, 10},
        {{FORWARD_OPENED, 0, 0, 0, 1, 0, 0, 0, '\n'}, 9},
        {{FORWARD_HELLO, 0, 4, 0, 0, 0, 0, 0, 1, 0, 0, 0, '\n'}, 13},
    };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(forward_feed(&f, bad[i].raw, bad[i].len), -EPROTO);
        assert_non_null(f.why);
        (void)finish(NULL);
        (void)begin(NULL);
    }
    open_one(3);
    assert_int_equal(give(FORWARD_OPEN, 3, NULL, 0), -EPROTO);
    assert_int_equal(give(FORWARD_EOF, 3, NULL, 0), 0);
}

static void a_channel_ends_once(void **state)
{
    (void)state;
    open_one(1);
    assert_int_equal(give(FORWARD_EOF, 1, NULL, 0), 0);
    assert_int_equal(give(FORWARD_DATA, 1, "x", 1), -EPROTO);
    assert_int_equal(give(FORWARD_EOF, 1, NULL, 0), -EPROTO);
}

static void a_server_is_found_in_the_kernels_table(void **state)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof to;
    (void)state;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&to, sizeof to), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&to, &size), 0);
    assert_false(forward_listens("/proc/net/tcp", ntohs(to.sin_port)));
    assert_int_equal(listen(fd, 1), 0);
    assert_true(forward_listens("/proc/net/tcp", ntohs(to.sin_port)));
    assert_false(forward_listens("/nonexistent", ntohs(to.sin_port)));
    f.port = ntohs(to.sin_port);
    int connection = forward_dial(&f, 0);
    assert_true(connection >= 0);
    assert_int_equal(close(connection), 0);
    assert_int_equal(forward_dial(&f, 2), -ENOENT);
    assert_int_equal(close(fd), 0);
}

/* The next frame of a program, which takes a moment to start. */
static struct forward_frame answer_of_program(void)
{
    struct forward_frame frame = answer();
    for (int turns = 0; turns < 500 && frame.type == 0; turns++)
        frame = answer();
    return frame;
}

static void a_program_has_the_connection_as_its_standard_streams(void **state)
{
    char *echo[] = {"/bin/sh", "-c", "read line; echo \"got $line\"; cat; exit 3", NULL};
    char text[16] = "";
    size_t len = 0;
    (void)state;
    f.dial = forward_start;
    f.program = echo;
    open_one(1);
    assert_int_equal(give(FORWARD_DATA, 1, "a\nb", 3), 0);
    assert_int_equal(give(FORWARD_EOF, 1, NULL, 0), 0);
    struct forward_frame frame = answer_of_program();
    for (; frame.type == FORWARD_DATA; frame = answer_of_program()) {
        assert_true(len + frame.length < sizeof text);
        memcpy(text + len, frame.payload, frame.length);
        len += frame.length;
    }
    assert_int_equal(frame.type, FORWARD_EOF);
    assert_string_equal(text, "got a\nb");
    assert_int_equal(f.channel[0].id, 0);
    assert_int_equal(forward_start(&f, 1), -ENOENT);
}

static void a_program_ends_with_its_channel(void **state)
{
    char *cat[] = {"/bin/cat", NULL}, status[1];
    int end[2];
    (void)state;
    /* the program alone has the other end of this pipe */
    assert_int_equal(pipe(end), 0);
    f.dial = forward_start;
    f.program = cat;
    open_one(1);
    (void)close(end[1]);
    assert_int_equal(give_number(FORWARD_CLOSE, 1, ECONNRESET), 0);
    assert_int_equal(read(end[0], status, sizeof status), 0);
    (void)close(end[0]);
}

static void a_program_that_is_missing_is_the_end_of_its_channel(void **state)
{
    char *missing[] = {"/nonexistent", NULL};
    (void)state;
    f.dial = forward_start;
    f.program = missing;
    open_one(1);
    assert_int_equal(answer_of_program().type, FORWARD_EOF);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, begin, finish)
    const struct CMUnitTest tests[] = {
        CASE(bytes_pass_and_each_direction_ends_by_itself),
        CASE(frames_may_come_in_pieces),
        CASE(the_host_gets_credit_for_what_the_program_takes),
        CASE(a_program_that_does_not_read_bounds_what_is_kept),
        CASE(the_program_is_read_as_far_as_the_host_allows),
        CASE(a_reset_of_either_side_closes_the_channel),
        CASE(a_port_without_a_server_is_the_end_of_its_channel),
        CASE(there_are_so_many_channels_and_no_more),
        CASE(what_the_protocol_does_not_permit_is_refused),
        CASE(a_channel_ends_once),
        CASE(a_server_is_found_in_the_kernels_table),
        CASE(a_program_has_the_connection_as_its_standard_streams),
        CASE(a_program_ends_with_its_channel),
        CASE(a_program_that_is_missing_is_the_end_of_its_channel),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
