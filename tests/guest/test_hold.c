/* SPDX-License-Identifier: Apache-2.0 */
/* Locks that delay a hold, and a host that goes away before, during and after one. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent.h"
#include "check.h"
#include "hold.h"

static const char mounts[] = "30 1 8:1 / / rw - ext4 /dev/vda rw\n"
                             "31 30 0:45 / /home rw - virtiofs home0 rw\n";

static bool finds(const char *locks, char *text, size_t size)
{
    char lock_file[] = "/tmp/vhpc-locks-XXXXXX", mount_file[] = "/tmp/vhpc-mounts-XXXXXX";
    const struct {
        char *path;
        const char *content;
    } files[] = {{lock_file, locks}, {mount_file, mounts}};
    for (size_t i = 0; i < 2; i++) {
        int fd = mkstemp(files[i].path);
        size_t len = strlen(files[i].content);
        assert_int_equal(write(fd, files[i].content, len), len);
        (void)close(fd);
    }
    bool found = hold_finds_lock(lock_file, mount_file, text, size);
    (void)unlink(lock_file);
    (void)unlink(mount_file);
    return found;
}

static void only_locks_on_files_of_shares_are_in_the_way(void **state)
{
    char text[256] = "";
    (void)state;
    assert_false(finds("", text, sizeof text));
    assert_false(finds("1: POSIX  ADVISORY  WRITE 812 08:01:1234 0 EOF\n", text, sizeof text));
    assert_false(finds("1: LEASE  ACTIVE    READ  812 00:2d:1234 0 EOF\n", text, sizeof text));
    assert_false(finds("1: -> POSIX  ADVISORY  WRITE 812 00:2d:1234 0 EOF\n", text, sizeof text));
    assert_false(finds("what is this\n", text, sizeof text));
    assert_true(finds("1: POSIX  ADVISORY  WRITE 812 08:01:1234 0 EOF\n"
                      "2: FLOCK  ADVISORY  READ  812 00:2d:1234 0 EOF\n",
                      text, sizeof text));
    assert_string_equal(text, "a program holds a lock on a file in /home");
}

/* A batch script that runs, without a process. */
static struct session *add_batch(struct agent *a)
{
    struct session *s = session_add(a, 1);
    assert_non_null(s);
    s->started = true;
    s->parked = true;
    s->task = (struct task){.ops = &session_ops, .arg = s, .pid = -1, .master = -1};
    s->task.report.fd = -1;
    s->task.reported = true;
    exchange_init(&s->task.exchange, FLOW_EXECUTOR, &a->loop, &a->host, 1, 0);
    s->task.exchange.owner = &s->task;
    s->spec.step = strdup("batch");
    return s;
}

static void open_host(struct agent *a, int pair[2])
{
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    assert_int_equal(host_open(a, pair[1], false), 0);
}

static void close_host(struct agent *a, int pair[2])
{
    (void)close(pair[0]);
    for (int i = 0; i < 10 && a->host_open; i++)
        assert_int_equal(loop_once(&a->loop, 0), 0);
    assert_false(a->host_open);
}

static void a_port_that_closes_ends_sessions_unless_the_guest_is_held(void **state)
{
    static const enum hold_phase phases[] = {HOLD_NONE, HOLD_DRAINING, HOLD_HELD};
    (void)state;
    for (size_t i = 0; i < sizeof phases / sizeof phases[0]; i++) {
        struct agent a = {.cgroup = strdup("/nonexistent")};
        int pair[2];
        bool held = phases[i] == HOLD_HELD;
        hello_init(&a.hello);
        open_host(&a, pair);
        struct session *batch = add_batch(&a), *control = session_add(&a, 2);
        a.hold.phase = phases[i];
        close_host(&a, pair);
        assert_true(control->closed);
        assert_int_equal(batch->closed, !held);
        assert_int_equal(batch->task.detached, held);
        assert_int_equal(a.hold.phase, held ? HOLD_HELD : HOLD_NONE);
        assert_null(session_find(&a, 1));
        if (held) /* the next host begins with a number that the last one has used */
            assert_ptr_not_equal(session_add(&a, 1), session_numbered(&a, batch->number));
        for (struct session *s = a.sessions; s != NULL; s = s->next) {
            session_close(s);
            s->task.reaped = true;
            s->task.finished = true;
        }
        (void)sessions_tick(&a, now_ms());
        assert_null(a.sessions);
        chan_release(&a.host);
        loop_free(&a.loop);
        free(a.cgroup);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_locks_on_files_of_shares_are_in_the_way),
        cmocka_unit_test(a_port_that_closes_ends_sessions_unless_the_guest_is_held),
    };
    (void)signal(SIGPIPE, SIG_IGN);
    return cmocka_run_group_tests_name("hold", tests, NULL, NULL);
}
