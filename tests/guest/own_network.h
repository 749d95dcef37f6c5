/* SPDX-License-Identifier: Apache-2.0 */
/* A network namespace of the test's own, and ip(8) in it. */
#ifndef OWN_NETWORK_H
#define OWN_NETWORK_H

#include <sched.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* Enter a new namespace; only root may, so the test is skipped for others. */
static inline void enter_own_network(void)
{
    if (unshare(CLONE_NEWNET) < 0) {
        print_message("interfaces are root's to make: run it as root\n");
        skip();
    }
}

static inline void run_ip(char *const words[])
{
    pid_t ip;
    int status;
    assert_int_equal(posix_spawnp(&ip, words[0], NULL, NULL, words, environ), 0);
    assert_int_equal(waitpid(ip, &status, 0), ip);
    assert_int_equal(status, 0);
}

#endif
