/* SPDX-License-Identifier: Apache-2.0 */
/* Streams of a command end to end: both ends in this process, over a socketpair. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "exchange.h"

struct ends {
    struct loop loop;
    struct chan chan[2];
    struct exchange x[2]; /* by flow_side */
    int violation;
};

static const uint8_t exec_head[] = {16, 0, 0,  0, 8, 0, 0, 0, 0, 1, 1, 2, 2, 2,
                                    3,  3, 17, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0};
static struct ends *now;

static int on_frame(struct chan *c, const struct frame *f)
{
    struct exchange *x = c->owner;
    int rc = exchange_receive(x, f);
    if (rc < 0)
        now->violation++;
    if (rc == 1 && f->type == VHPC_EXEC) {
        (void)exchange_send(x, VHPC_STARTED, 0, 0, NULL, 0);
        x->live = true;
    } else if (rc == 1 && f->type == VHPC_STARTED) {
        x->live = true;
    }
    return 0;
}

static void on_close(struct chan *c, int error)
{
    (void)c;
    (void)error;
}

static void open_ends(struct ends *e)
{
    int pair[2];
    struct buf exec = {0};
    memset(e, 0, sizeof *e);
    now = e;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(fd_prepare(pair[i]), 0);
        e->chan[i].on_frame = on_frame;
        e->chan[i].on_close = on_close;
        e->chan[i].owner = &e->x[i];
        assert_int_equal(chan_open(&e->chan[i], &e->loop, pair[i]), 0);
        exchange_init(&e->x[i], (enum flow_side)i, &e->loop, &e->chan[i], 0, 0);
    }
    assert_int_equal(buf_append(&exec, exec_head, sizeof exec_head), 0);
    assert_int_equal(exchange_send_exec(&e->x[0], &exec), 0);
    buf_free(&exec);
    for (int i = 0; i < 10; i++)
        assert_int_equal(loop_once(&e->loop, 0), 0);
    assert_true(e->x[0].live && e->x[1].live);
}

static void close_ends(struct ends *e)
{
    for (int i = 0; i < 2; i++) {
        exchange_close(&e->x[i]);
        chan_release(&e->chan[i]);
    }
    loop_free(&e->loop);
}

static void turn(struct ends *e, int times)
{
    for (int i = 0; i < times; i++)
        assert_int_equal(loop_once(&e->loop, 0), 0);
}

static int temp_file(size_t size)
{
    char path[] = "/tmp/vhpc-test-XXXXXX";
    int fd = mkostemp(path, O_CLOEXEC);
    assert_true(fd >= 0);
    (void)unlink(path);
    unsigned state = 12345;
    for (size_t done = 0; done < size;) {
        uint8_t part[8192];
        for (size_t i = 0; i < sizeof part; i++) {
            state = state * 1103515245u + 12345u;
            part[i] = (uint8_t)(state >> 16);
        }
        assert_int_equal(write(fd, part, sizeof part), sizeof part);
        done += sizeof part;
    }
    (void)lseek(fd, 0, SEEK_SET);
    return fd;
}

static bool same_file(int a, int b)
{
    uint8_t left[8192], right[8192];
    (void)lseek(a, 0, SEEK_SET);
    (void)lseek(b, 0, SEEK_SET);
    for (;;) {
        ssize_t n = read(a, left, sizeof left), m = read(b, right, sizeof right);
        if (n != m || (n > 0 && memcmp(left, right, (size_t)n) != 0))
            return false;
        if (n <= 0)
            return true;
    }
}

static void megabytes_pass_unchanged_while_another_stream_is_stalled(void **state)
{
    struct ends e;
    int stalled[2];
    static uint8_t zeros[8192];
    (void)state;
    open_ends(&e);
    int from = temp_file(8 << 20), to = temp_file(0);
    int endless = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    assert_int_equal(pipe2(stalled, O_CLOEXEC | O_NONBLOCK), 0);
    while (write(stalled[1], zeros, sizeof zeros) > 0)
        ; /* stderr has no reader */
    assert_int_equal(exchange_read_from(&e.x[1], 1, dup(from), LOCALFD_OWN), 0);
    assert_int_equal(exchange_read_from(&e.x[1], 2, endless, LOCALFD_OWN), 0);
    assert_int_equal(exchange_write_to(&e.x[0], 1, dup(to), LOCALFD_OWN), 0);
    assert_int_equal(exchange_write_to(&e.x[0], 2, stalled[1], LOCALFD_OWN), 0);
    turn(&e, 5000);
    assert_int_equal(e.violation, 0);
    assert_true(same_file(from, to));
    assert_false(e.x[0].outlet[1].open); /* EOF has arrived */
    assert_true(e.x[0].outlet[2].queue.len <= 1048576);
    assert_true(e.x[0].outlet[2].queue.len > 0);
    (void)close(from);
    (void)close(to);
    (void)close(stalled[0]);
    close_ends(&e);
}

/* The read end of a pipe into which a child writes the file, `piece` bytes at a time. */
static int piped(int file, size_t piece)
{
    int ends[2];
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    /* as a task does: more pages than a message takes, so that some messages are short */
    assert_true(fcntl(ends[0], F_SETPIPE_SZ, VHPC_WINDOW) >= VHPC_WINDOW);
    assert_int_equal(fd_prepare(ends[0]), 0);
    pid_t pid = fork();
    if (pid == 0) {
        uint8_t *part = malloc(piece);
        off_t at = 0;
        for (ssize_t n; part != NULL && (n = pread(file, part, piece, at)) > 0; at += n)
            if (write(ends[1], part, (size_t)n) != n)
                _exit(1);
        _exit(0);
    }
    assert_true(pid > 0);
    (void)close(ends[1]);
    return ends[0];
}

/* Data for a port is moved between pipes if possible, and copied otherwise. */
static void pipes_pass_unchanged_into_a_port(void **state)
{
    static const size_t piece[][2] = {{1 << 20, 5000}, {4096, 77}, {65536, 65536}};
    (void)state;
    for (size_t i = 0; i < sizeof piece / sizeof piece[0]; i++) {
        struct ends e;
        open_ends(&e);
        e.chan[FLOW_EXECUTOR].port = e.chan[FLOW_EXECUTOR].moves_pages = true;
        int from = temp_file(5 << 20), to[2] = {temp_file(0), temp_file(0)};
        for (uint8_t n = 0; n < 2; n++) {
            uint8_t fd = (uint8_t)(n + 1);
            assert_int_equal(exchange_read_from(&e.x[1], fd, piped(from, piece[i][n]), LOCALFD_OWN),
                             0);
            assert_int_equal(exchange_write_to(&e.x[0], fd, dup(to[n]), LOCALFD_OWN), 0);
        }
        while (e.x[0].outlet[1].open || e.x[0].outlet[2].open)
            assert_int_equal(loop_once(&e.loop, 20), 0);
        assert_int_equal(e.violation, 0);
        assert_true(same_file(from, to[0]));
        assert_true(same_file(from, to[1]));
        assert_true(e.chan[FLOW_EXECUTOR].stage[1] > 0);
        (void)close(from);
        (void)close(to[0]);
        (void)close(to[1]);
        close_ends(&e);
    }
}

static void a_reader_that_goes_away_stops_the_source(void **state)
{
    struct ends e;
    int out[2];
    (void)state;
    open_ends(&e);
    assert_int_equal(pipe2(out, O_CLOEXEC | O_NONBLOCK), 0);
    assert_int_equal(
        exchange_read_from(&e.x[1], 1, open("/dev/zero", O_RDONLY | O_CLOEXEC), LOCALFD_OWN), 0);
    assert_int_equal(exchange_write_to(&e.x[0], 1, out[1], LOCALFD_OWN), 0);
    turn(&e, 20);
    assert_true(e.x[1].inlet[1].open);
    (void)close(out[0]);
    turn(&e, 50);
    assert_false(e.x[1].inlet[1].open);
    assert_int_equal(e.violation, 0);
    close_ends(&e);
}

static void a_full_disk_is_a_reader_that_is_gone(void **state)
{
    struct ends e;
    (void)state;
    int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    if (full < 0)
        skip();
    open_ends(&e);
    assert_int_equal(
        exchange_read_from(&e.x[1], 1, open("/dev/zero", O_RDONLY | O_CLOEXEC), LOCALFD_OWN), 0);
    assert_int_equal(exchange_write_to(&e.x[0], 1, full, LOCALFD_OWN), 0);
    turn(&e, 50);
    assert_false(e.x[1].inlet[1].open);
    assert_int_equal(e.violation, 0);
    close_ends(&e);
}

static void a_file_is_written_at_once_and_its_limit_ends_the_stream(void **state)
{
    struct ends e;
    struct rlimit before, small;
    struct stat st;
    static const uint8_t part[4096] = {1};
    (void)state;
    open_ends(&e);
    int file = temp_file(0), pair[2];
    assert_int_equal(pipe2(pair, O_CLOEXEC | O_NONBLOCK), 0);
    assert_int_equal(exchange_read_from(&e.x[1], 1, pair[0], LOCALFD_OWN), 0);
    assert_int_equal(exchange_write_to(&e.x[0], 1, dup(file), LOCALFD_OWN), 0);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = (struct rlimit){.rlim_cur = 6000, .rlim_max = before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    for (int i = 0; i < 3; i++) {
        (void)!write(pair[1], part, sizeof part);
        turn(&e, 5);
    }
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(fstat(file, &st), 0);
    assert_int_equal(st.st_size, 6000);
    assert_false(e.x[0].outlet[1].open);
    assert_false(e.x[1].inlet[1].open);
    assert_int_equal(e.violation, 0);
    (void)close(file);
    (void)close(pair[1]);
    close_ends(&e);
}

/* Sockets of "server" and "program", with the exchange between them, under number 3. */
static void join(struct ends *e, int server[2], int program[2])
{
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, server), 0);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, program), 0);
    assert_int_equal(exchange_connect(&e->x[0], 3, server[1]), 0);
    assert_int_equal(exchange_connect(&e->x[1], 3, program[1]), 0);
}

static void reads(int fd, const char *expected)
{
    char text[64] = "";
    assert_int_equal(read(fd, text, sizeof text - 1), strlen(expected));
    assert_string_equal(text, expected);
}

static void each_direction_of_a_socket_ends_by_itself(void **state)
{
    struct ends e;
    int server[2], program[2];
    (void)state;
    open_ends(&e);
    join(&e, server, program);
    assert_int_equal(write(program[0], "request", 7), 7);
    turn(&e, 10);
    reads(server[0], "request");
    assert_int_equal(shutdown(program[0], SHUT_WR), 0);
    turn(&e, 10);
    reads(server[0], ""); /* the end of the stream */
    assert_int_equal(write(server[0], "answer", 6), 6);
    turn(&e, 10);
    reads(program[0], "answer");
    (void)close(server[0]);
    turn(&e, 10);
    reads(program[0], "");
    assert_int_equal(e.violation, 0);
    assert_true(exchange_inlets_done(&e.x[0]) && exchange_inlets_done(&e.x[1]));
    (void)close(program[0]);
    close_ends(&e);
}

static void who_writes_to_a_socket_without_reader_gets_epipe(void **state)
{
    struct ends e;
    int server[2], program[2];
    (void)state;
    open_ends(&e);
    join(&e, server, program);
    assert_int_equal(write(server[0], "last", 4), 4);
    (void)close(server[0]);
    turn(&e, 10);
    assert_int_equal(write(program[0], "x", 1), -1);
    assert_int_equal(errno, EPIPE);
    reads(program[0], "last");
    assert_int_equal(e.violation, 0);
    (void)close(program[0]);
    close_ends(&e);
}

static void send_sync(struct ends *e, uint8_t number)
{
    assert_int_equal(exchange_send(&e->x[1], VHPC_SYNC, number, 0, NULL, 0), 0);
}

static void sync_returns_all_credit_once_everything_is_written(void **state)
{
    struct ends e;
    int stalled[2], from[2];
    static uint8_t part[8192];
    (void)state;
    open_ends(&e);
    assert_int_equal(pipe2(stalled, O_CLOEXEC | O_NONBLOCK), 0);
    assert_int_equal(pipe2(from, O_CLOEXEC | O_NONBLOCK), 0);
    while (write(stalled[1], part, sizeof part) > 0)
        ;
    assert_int_equal(exchange_read_from(&e.x[1], 1, from[0], LOCALFD_OWN), 0);
    assert_int_equal(exchange_write_to(&e.x[0], 1, stalled[1], LOCALFD_OWN), 0);
    assert_int_equal(write(from[1], part, sizeof part), sizeof part);
    turn(&e, 20);
    assert_false(flow_settled(&e.x[1].flow, 1));
    send_sync(&e, 1);
    turn(&e, 20);
    assert_false(flow_settled(&e.x[1].flow, 1)); /* it is not written yet */
    while (read(stalled[0], part, sizeof part) > 0)
        turn(&e, 1);
    turn(&e, 20);
    assert_true(flow_settled(&e.x[1].flow, 1));
    /* Later data are acknowledged in large pieces again. */
    assert_int_equal(write(from[1], part, sizeof part), sizeof part);
    turn(&e, 20);
    assert_false(flow_settled(&e.x[1].flow, 1));
    /* Also after EOF, when the other end has closed its file. */
    (void)close(from[1]);
    turn(&e, 20);
    assert_false(e.x[0].outlet[1].open);
    send_sync(&e, 1);
    turn(&e, 20);
    assert_true(flow_settled(&e.x[1].flow, 1));
    assert_int_equal(e.violation, 0);
    (void)close(stalled[0]);
    close_ends(&e);
}

int main(void)
{
    (void)signal(SIGPIPE, SIG_IGN);
    (void)signal(SIGXFSZ, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(megabytes_pass_unchanged_while_another_stream_is_stalled),
        cmocka_unit_test(pipes_pass_unchanged_into_a_port),
        cmocka_unit_test(a_reader_that_goes_away_stops_the_source),
        cmocka_unit_test(sync_returns_all_credit_once_everything_is_written),
        cmocka_unit_test(a_full_disk_is_a_reader_that_is_gone),
        cmocka_unit_test(a_file_is_written_at_once_and_its_limit_ends_the_stream),
        cmocka_unit_test(each_direction_of_a_socket_ends_by_itself),
        cmocka_unit_test(who_writes_to_a_socket_without_reader_gets_epipe),
    };
    return cmocka_run_group_tests_name("exchange", tests, NULL, NULL);
}
