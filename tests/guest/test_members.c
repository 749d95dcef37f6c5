/* SPDX-License-Identifier: Apache-2.0 */
/* vhpc-members: guests of a cluster, joins and leaves. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "file.h"
#include "members.h"
#include "textfile.h"

#define N1 "{\"host\": \"n1-j1\", \"job\": 1}\n"
#define N2 "{\"host\": \"n2-j2\", \"job\": 2}\n"
#define N3 "{\"host\": \"n3-j3\", \"job\": 3}\n"

enum { WAIT_MS = 30000 };

static char folder[64];

static int setup(void **state)
{
    (void)state;
    (void)snprintf(folder, sizeof folder, "/tmp/vhpc-members-XXXXXX");
    return mkdtemp(folder) == NULL ? -1 : 0;
}

static int teardown(void **state)
{
    (void)state;
    return remove_folder(folder);
}

static void set_members(const char *text)
{
    char path[96];
    (void)snprintf(path, sizeof path, "%s/members", folder);
    assert_int_equal(replace_file(path, 0644, text, strlen(text)), 0);
}

struct follower {
    pid_t pid;
    int from;
};

/* members_follow() in a process of its own. */
static struct follower follow(void)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)signal(SIGPIPE, SIG_IGN);
        (void)close(ends[0]);
        FILE *out = fdopen(ends[1], "w");
        _exit(out == NULL ? 99 : members_follow(folder, out));
    }
    (void)close(ends[1]);
    return (struct follower){pid, ends[0]};
}

/* The next bytes of its output are these. */
static void expect(const struct follower *f, const char *text)
{
    char got[1024] = "";
    size_t len = 0;
    while (len < strlen(text)) {
        struct pollfd wait = {.fd = f->from, .events = POLLIN};
        assert_int_equal(poll(&wait, 1, WAIT_MS), 1);
        ssize_t n = read(f->from, got + len, strlen(text) - len);
        assert_true(n > 0);
        len += (size_t)n;
    }
    assert_string_equal(got, text);
}

static void changes_are_told_once(void **state)
{
    int status;
    (void)state;
    set_members(N1 N2);
    struct follower f = follow();
    expect(&f, "{\"event\": \"join\", \"host\": \"n1-j1\", \"job\": 1}\n"
               "{\"event\": \"join\", \"host\": \"n2-j2\", \"job\": 2}\n");
    set_members(N1 N2); /* nothing new */
    set_members(N1 N2 N3);
    expect(&f, "{\"event\": \"join\", \"host\": \"n3-j3\", \"job\": 3}\n");
    set_members(N2 N3);
    expect(&f, "{\"event\": \"leave\", \"host\": \"n1-j1\", \"job\": 1}\n");
    set_members(N3);
    expect(&f, "{\"event\": \"leave\", \"host\": \"n2-j2\", \"job\": 2}\n");
    assert_int_equal(kill(f.pid, SIGTERM), 0);
    assert_int_equal(waitpid(f.pid, &status, 0), f.pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
    (void)close(f.from);
}

static void it_ends_with_its_reader(void **state)
{
    int status;
    (void)state;
    set_members(N1);
    struct follower f = follow();
    expect(&f, "{\"event\": \"join\", \"host\": \"n1-j1\", \"job\": 1}\n");
    (void)close(f.from); /* without any change of the cluster */
    assert_int_equal(waitpid(f.pid, &status, 0), f.pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void the_list_is_printed_as_it_is(void **state)
{
    char *text = NULL;
    size_t size = 0;
    (void)state;
    FILE *out = open_memstream(&text, &size);
    assert_non_null(out);
    set_members(N1 N2);
    assert_int_equal(members_print(folder, out), 0);
    assert_int_equal(fclose(out), 0);
    assert_string_equal(text, N1 N2);
    free(text);
}

static void outside_of_a_cluster_it_fails(void **state)
{
    (void)state;
    assert_int_equal(members_print("/nonexistent", stdout), 1);
    assert_int_equal(members_follow("/nonexistent", stdout), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(changes_are_told_once, setup, teardown),
        cmocka_unit_test_setup_teardown(it_ends_with_its_reader, setup, teardown),
        cmocka_unit_test_setup_teardown(the_list_is_printed_as_it_is, setup, teardown),
        cmocka_unit_test(outside_of_a_cluster_it_fails),
    };
    return cmocka_run_group_tests_name("vhpc-members", tests, NULL, NULL);
}
