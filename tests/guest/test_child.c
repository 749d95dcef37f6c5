/* SPDX-License-Identifier: Apache-2.0 */
/* What a child of the agent gives up. */
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "child.h"

enum { KEPT = 20, LOW = 21, HIGH = 900 };

static bool is_open(int fd)
{
    return fcntl(fd, F_GETFD) >= 0;
}

/* Number of what the child still has, 0: all is as it should be. */
static int shed(pid_t parent)
{
    struct sigaction act;
    sigset_t blocked;
    int ends_with = 0;
    (void)signal(SIGTERM, SIG_IGN);
    (void)signal(SIGRTMIN, SIG_IGN);
    (void)sigemptyset(&blocked);
    (void)sigaddset(&blocked, SIGUSR1);
    (void)sigprocmask(SIG_BLOCK, &blocked, NULL);
    if (dup2(0, KEPT) < 0 || dup2(0, LOW) < 0 || dup2(0, HIGH) < 0)
        return 1;
    if (!child_shed(KEPT + 1, parent))
        return 2;
    if (!is_open(KEPT) || is_open(LOW) || is_open(HIGH))
        return 3;
    if (sigaction(SIGTERM, NULL, &act) < 0 || act.sa_handler != SIG_DFL ||
        sigaction(SIGRTMIN, NULL, &act) < 0 || act.sa_handler != SIG_DFL)
        return 4;
    if (sigprocmask(SIG_SETMASK, NULL, &blocked) < 0 || sigismember(&blocked, SIGUSR1))
        return 5;
    if (prctl(PR_GET_PDEATHSIG, &ends_with, 0, 0, 0) < 0 || ends_with != SIGKILL)
        return 6;
    return 0;
}

static int shed_in_child(pid_t parent)
{
    int status;
    pid_t pid = fork();
    if (pid == 0)
        _exit(shed(parent));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void a_helper_has_neither_the_signals_nor_the_files_of_its_parent(void **state)
{
    (void)state;
    assert_int_equal(shed_in_child(getpid()), 0);
}

static void a_helper_whose_parent_has_ended_is_told(void **state)
{
    (void)state;
    assert_int_equal(shed_in_child(getppid()), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_helper_has_neither_the_signals_nor_the_files_of_its_parent),
        cmocka_unit_test(a_helper_whose_parent_has_ended_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
