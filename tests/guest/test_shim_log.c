/* SPDX-License-Identifier: Apache-2.0 */
/* The shim's log: bounded, whole lines, no control sequences for a terminal. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "log.h"

static char said[65536];

/* Everything that `act` writes to stderr. */
static const char *stderr_of(void (*act)(void))
{
    FILE *file = tmpfile();
    assert_non_null(file);
    (void)fflush(stderr);
    int saved = dup(STDERR_FILENO);
    assert_true(dup2(fileno(file), STDERR_FILENO) >= 0);
    act();
    (void)fflush(stderr);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    (void)close(saved);
    rewind(file);
    size_t n = fread(said, 1, sizeof said - 1, file);
    said[n] = '\0';
    (void)fclose(file);
    return said;
}

static void feed(void)
{
    static struct log_pipe p = {.tag = "home1"};
    char long_line[2000];
    memset(long_line, 'x', sizeof long_line);
    log_pipe_feed(&p, "first li", 8);
    log_pipe_feed(&p, "ne\n\nsec\x1b[2Jond\n", 16);
    log_pipe_feed(&p, long_line, sizeof long_line);
    log_pipe_feed(&p, "\nlast", 5);
    log_pipe_feed(&p, "\n", 1);
}

static void lines_are_whole_tagged_and_printable(void **state)
{
    (void)state;
    const char *out = stderr_of(feed);
    assert_true(strncmp(out, "vhpc-shim: home1: first line\nvhpc-shim: home1: sec?[2Jond\n", 57) ==
                0);
    const char *third = strchr(strchr(out, '\n') + 1, '\n') + 1;
    const char *end = strchr(third, '\n');
    assert_non_null(end);
    assert_true(end - third < LOG_LINE_MAX + 20);
    assert_string_equal(end + 1, "vhpc-shim: home1: last\n");
}

static void flood(void)
{
    for (int i = 0; i < 5000; i++)
        log_line("client of uid %d dropped", i);
}

static void a_flood_of_lines_is_cut(void **state)
{
    (void)state;
    size_t lines = 0;
    for (const char *at = stderr_of(flood); (at = strchr(at, '\n')) != NULL; at++)
        lines++;
    assert_true(lines >= 10 && lines <= LOG_BURST + 5);
}

static void a_bad_specification_is_refused(void **state)
{
    static const char *const bad[] = {"",
                                      "5",
                                      ":5",
                                      "home:",
                                      "home:x",
                                      "home:5x",
                                      "home:-1",
                                      "home:99999999999",
                                      "a-tag-that-is-longer-than-any-share-has:5"};
    struct loop loop = {0};
    struct log_pipe p;
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_true(log_pipe_open(&p, &loop, bad[i]) < 0);
    loop_free(&loop);
}

static void a_pipe_is_read_to_its_end(void **state)
{
    struct loop loop = {0};
    struct log_pipe p;
    char spec[32];
    int ends[2];
    (void)state;
    assert_int_equal(pipe(ends), 0);
    (void)snprintf(spec, sizeof spec, "site0:%d", ends[0]);
    assert_int_equal(log_pipe_open(&p, &loop, spec), 0);
    assert_int_equal(write(ends[1], "x", 1), 1);
    (void)close(ends[1]);
    for (int i = 0; i < 3; i++)
        assert_int_equal(loop_once(&loop, 0), 0);
    assert_int_equal(loop.count, 0);
    loop_free(&loop);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_are_whole_tagged_and_printable),
        cmocka_unit_test(a_flood_of_lines_is_cut),
        cmocka_unit_test(a_bad_specification_is_refused),
        cmocka_unit_test(a_pipe_is_read_to_its_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
