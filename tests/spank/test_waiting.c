/* SPDX-License-Identifier: Apache-2.0 */
/* The users who read the progress of guests, and the process that prints it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "waiting.h"

static int terminal = -1;

static int open_terminal(void **unused)
{
    (void)unused;
    terminal = posix_openpt(2 /* O_RDWR */);
    return terminal < 0 ? -1 : 0;
}

static int close_terminal(void **unused)
{
    (void)unused;
    return close(terminal);
}

static bool waits(const char *program, const char *quiet, int fd, const char *option)
{
    char *argv[] = {"srun", "-N2", (char *)option, "prog", NULL};

    return vhpc_somebody_waits(program, argv, quiet, fd);
}

/* promise: boot.progress */
static void srun_and_salloc_on_a_terminal_wait(void **unused)
{
    int ends[2];

    (void)unused;
    assert_int_equal(pipe(ends), 0);
    assert_true(waits("srun", NULL, terminal, "-n4"));
    assert_true(waits("salloc", "", terminal, "--job-name=Q"));
    assert_true(waits("srun", NULL, terminal, "-JBenchmarkQ"));
    assert_false(waits("sbatch", NULL, terminal, "-n4"));
    assert_false(waits("srun", NULL, ends[1], "-n4"));
    assert_false(waits("srun", "1", terminal, "-n4"));
    assert_false(waits("srun", NULL, terminal, "-Q"));
    assert_false(waits("srun", NULL, terminal, "-lQ"));
    assert_false(waits("srun", NULL, terminal, "--quiet"));
    (void)close(ends[0]);
    (void)close(ends[1]);
}

static void own_arguments_are_read_as_far_as_there_is_room(void **unused)
{
    char text[65536];
    char *argv[64];

    (void)unused;
    assert_int_equal(vhpc_own_arguments(text, sizeof text, argv, 64), 1);
    assert_non_null(strstr(argv[0], "test_spank_waiting"));
    assert_null(argv[1]);
    assert_int_equal(vhpc_own_arguments(text, 4, argv, 64), 0);
    assert_null(argv[0]);
    assert_int_equal(vhpc_own_arguments(text, sizeof text, argv, 1), 0);
    assert_null(argv[0]);
}

static void words_differ(void **unused)
{
    char one[VHPC_WAITER_SIZE];
    char two[VHPC_WAITER_SIZE];

    (void)unused;
    assert_true(vhpc_waiter_word(one));
    assert_true(vhpc_waiter_word(two));
    assert_int_equal(strspn(one, "0123456789abcdef"), 32);
    assert_int_equal(strlen(one), 32);
    assert_string_not_equal(one, two);
}

/* The watcher is this script; it writes its arguments and open files to a pipe that is its
 * stderr. */
/* promise: boot.progress */
static void the_watcher_is_no_child_and_has_no_files(void **unused)
{
    char path[] = "/tmp/vhpc-watcher-XXXXXX";
    char said[4096];
    char expected[64];
    int ends[2];
    int kept = dup(STDERR_FILENO);
    int fd = mkstemp(path);
    size_t used = 0;
    ssize_t n;

    (void)unused;
    assert_true(fd >= 0);
    assert_true(dprintf(fd, "#!/bin/sh\necho \"$*\" >&2\nls -x /proc/$$/fd >&2\necho end >&2\n") >
                0);
    assert_int_equal(fchmod(fd, 0755), 0);
    (void)close(fd);
    assert_int_equal(pipe(ends), 0);
    assert_true(dup2(ends[1], STDERR_FILENO) >= 0);
    vhpc_watch_boot(path, "0123");
    assert_true(dup2(kept, STDERR_FILENO) >= 0);
    (void)close(kept);
    (void)close(ends[1]);
    while (used < sizeof said - 1 && (n = read(ends[0], said + used, sizeof said - 1 - used)) > 0)
        used += (size_t)n;
    said[used] = '\0';
    (void)close(ends[0]);
    (void)unlink(path);
    snprintf(expected, sizeof expected, "boot-watch 0123 %ld\n", (long)getpid());
    assert_non_null(strstr(said, expected));
    assert_non_null(strstr(said, "end\n"));
    for (const char *open_file = strchr(said, '\n') + 1; *open_file != 'e'; open_file++) {
        char *rest;
        long number = strtol(open_file, &rest, 10);

        assert_true(number < 3 || number >= 10); /* the shell has its own from 10 on */
        open_file = rest;
    }
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* ECHILD */
}

static void a_command_that_is_not_there_is_no_error(void **unused)
{
    (void)unused;
    vhpc_watch_boot("/nowhere/vhpc", "0123");
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(srun_and_salloc_on_a_terminal_wait),
        cmocka_unit_test(own_arguments_are_read_as_far_as_there_is_room),
        cmocka_unit_test(words_differ),
        cmocka_unit_test(the_watcher_is_no_child_and_has_no_files),
        cmocka_unit_test(a_command_that_is_not_there_is_no_error),
    };
    return cmocka_run_group_tests(tests, open_terminal, close_terminal);
}
