/* SPDX-License-Identifier: Apache-2.0 */
/* The file of a guest's console: which parts are kept, and how much disk space it uses. */
#include "check.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "console.h"

enum { KEEP = 64 << 10, LINE = 32 };

struct fixture {
    struct loop loop;
    struct console console;
    int guest; /* QEMU opens the file in append mode */
    char path[64];
};

static int set_up(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    /* in memory, as not every directory for temporary files allows holes */
    (void)strcpy(f->path, "/dev/shm/vhpc-console-XXXXXX");
    int fd = mkstemp(f->path);
    if (fd < 0)
        return -1;
    f->guest = open(f->path, O_WRONLY | O_APPEND | O_CLOEXEC);
    *state = f;
    return console_open(&f->console, &f->loop, fd, KEEP);
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    loop_remove(&f->loop, &f->console.source);
    (void)close(f->console.source.fd);
    (void)close(f->console.fd);
    (void)close(f->guest);
    (void)unlink(f->path);
    loop_free(&f->loop);
    free(f);
    return 0;
}

/* Lines of LINE bytes with their number. */
static void say(const struct fixture *f, int from, int to)
{
    char line[LINE + 1];
    for (int i = from; i < to; i++) {
        (void)snprintf(line, sizeof line, "%-31d\n", i);
        assert_int_equal(write(f->guest, line, LINE), LINE);
    }
}

static int line_at(const struct fixture *f, off_t at)
{
    char line[LINE + 1] = {0};
    assert_int_equal(pread(f->console.fd, line, LINE, at), LINE);
    return (int)strtol(line, NULL, 10);
}

static void a_short_console_is_left_alone(void **state)
{
    struct fixture *f = *state;
    struct stat st;
    say(f, 0, 3 * KEEP / LINE - 1);
    assert_int_equal(loop_once(&f->loop, 1000), 0);
    assert_int_equal(fstat(f->guest, &st), 0);
    assert_true(st.st_blocks * 512 >= 3 * KEEP - LINE);
    for (off_t at = 0; at < 3 * KEEP - LINE; at += LINE)
        assert_int_equal(line_at(f, at), at / LINE);
}

/* promise: console.size */
static void a_long_console_keeps_its_beginning_and_its_end(void **state)
{
    struct fixture *f = *state;
    struct stat st;
    int lines = 100 * KEEP / LINE;
    for (int i = 0; i < lines; i += 500) {
        say(f, i, i + 500 < lines ? i + 500 : lines);
        assert_int_equal(loop_once(&f->loop, 1000), 0); /* hears of it by inotify */
        assert_int_equal(fstat(f->guest, &st), 0);
        assert_true(st.st_blocks * 512 <= 4 * KEEP + 500 * LINE);
    }
    assert_int_equal(st.st_size, (off_t)lines * LINE);
    for (off_t at = 0; at < KEEP; at += LINE)
        assert_int_equal(line_at(f, at), at / LINE);
    for (off_t at = st.st_size - KEEP; at < st.st_size; at += LINE)
        assert_int_equal(line_at(f, at), at / LINE);
    assert_int_equal(lseek(f->console.fd, 0, SEEK_HOLE), KEEP);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_short_console_is_left_alone, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_long_console_keeps_its_beginning_and_its_end, set_up,
                                        tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
