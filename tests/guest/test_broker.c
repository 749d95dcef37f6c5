/* SPDX-License-Identifier: Apache-2.0 */
/* promise: shares.locks */
/* The lock broker of a guest whose node is another one after a while. */
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include "broker.h"
#include "check.h"
#include "file.h"

static void answer_hello(int port)
{
    static uint8_t in[LOCKS_REQUEST + LOCKS_TEXT_MAX], out[LOCKS_REPLY + LOCKS_TEXT_MAX];
    struct locks_request r;
    struct locks_reply reply;
    size_t have = 0;
    while (locks_unpack_request(in, have, &r) == 0) {
        ssize_t n = read(port, in + have, sizeof in - have);
        assert_true(n > 0);
        have += (size_t)n;
    }
    assert_int_equal(r.op, LOCKS_HELLO);
    reply = (struct locks_reply){.id = r.id, .text = ""};
    assert_int_equal(write_all(port, out, locks_pack_reply(out, &reply)), 0);
}

/* A terminal is a port that can be closed and opened again. */
static void a_broker_greets_the_next_node(void **state)
{
    int reports[2], status;
    struct termios raw;
    (void)state;
    int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    assert_true(master >= 0 && unlockpt(master) == 0);
    const char *path = ptsname(master);
    int port = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);
    assert_true(port >= 0);
    assert_int_equal(tcgetattr(port, &raw), 0);
    cfmakeraw(&raw);
    assert_int_equal(tcsetattr(port, TCSANOW, &raw), 0);
    assert_int_equal(pipe2(reports, O_CLOEXEC), 0);
    pid_t pid = fork();
    if (pid == 0) {
        (void)close(reports[1]);
        _exit(broker_run(port, path, reports[0]));
    }
    answer_hello(master);
    /* Our own copy of the port keeps its settings. */
    assert_int_equal(kill(pid, SIGUSR1), 0);
    answer_hello(master);
    (void)close(reports[1]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    (void)close(reports[0]);
    (void)close(port);
    (void)close(master);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_broker_greets_the_next_node),
    };
    return cmocka_run_group_tests_name("broker", tests, NULL, NULL);
}
