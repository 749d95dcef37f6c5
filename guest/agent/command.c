/* SPDX-License-Identifier: Apache-2.0 */
/*
 * This binary under another name (srun, scontrol, ...): the command runs on the host, as the job's
 * user, and this process represents it.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent.h"
#include "front.h"
#include "launcher.h"
#include "launcher_refuse.h"
#include "request.h"
#include "resumed.h"

enum { TIMEOUT_MS = 30000, RETRY_FIRST_MS = 50, RETRY_MAX_MS = 1000 };

/*
 * A session may have a limited number of host commands at a time. Further ones wait, as srun waits
 * for the CPUs of earlier steps. Nothing has been read from standard input before a command starts.
 */
static struct front_result run(const struct execspec *spec, const char *socket)
{
    static struct front front;
    struct front_result result;
    for (int wait_ms = RETRY_FIRST_MS;; wait_ms = wait_ms < RETRY_MAX_MS ? 2 * wait_ms : wait_ms) {
        front = (struct front){.spec = spec, .timeout_ms = TIMEOUT_MS, .group_fd = -1};
        result = front_run(&front, socket);
        if (result.end != FRONT_REFUSED || result.value != EAGAIN)
            return result;
        front_forget(&front);
        (void)poll(NULL, 0, wait_ms);
    }
}

static int describe_step(char **srun, struct execspec *spec)
{
    int rc = 0;
    while (*srun != NULL && rc == 0)
        rc = execspec_add_arg(spec, *srun++);
    return rc;
}

_Noreturn void command_main(int argc, char **argv, const char *name)
{
    static struct execspec spec;
    resumed_apply(RESUMED_FILE);
    const char *socket = getenv("VHPC_CALL_SOCKET");
    char **srun = strcmp(name, "sbcast") == 0 ? sbcast_as_srun(argc, argv) : NULL;
    struct launch launch = {.kind = LAUNCH_OTHER};
    if (strcmp(name, "srun") == 0) {
        launch = launcher_read(argc, argv);
        launcher_refuse(&launch);
    }
    if (launch.kind == LAUNCH_OPENMPI)
        launcher_show_errors();
    int rc = front_describe_self(&spec);
    if (rc == 0 && srun != NULL)
        rc = describe_step(srun, &spec);
    else if (rc == 0)
        rc = request_describe(name, argc, argv, &spec);
    if (rc < 0) {
        (void)fprintf(stderr, "%s: %s\n", name, strerror(-rc));
        exit(1);
    }
    struct front_result result = run(&spec, socket != NULL ? socket : VHPC_CALL_SOCKET);
    if (launch.kind == LAUNCH_OPENMPI)
        launcher_end(&result);
    front_exit_as(&result, name);
}
