/* SPDX-License-Identifier: Apache-2.0 */
/*
 * This binary under another name (srun, scontrol, ...): the command runs on the host, as the job's
 * user, and this process represents it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent.h"
#include "front.h"

enum { TIMEOUT_MS = 30000 };

_Noreturn void command_main(int argc, char **argv, const char *name)
{
    static struct front front;
    static struct execspec spec;
    const char *socket = getenv("VHPC_CALL_SOCKET");
    char **srun = strcmp(name, "sbcast") == 0 ? sbcast_as_srun(argc, argv) : NULL;
    char **args = srun != NULL ? srun : argv;
    int rc = front_describe_self(&spec);
    if (rc == 0)
        rc = execspec_add_arg(&spec, srun != NULL ? srun[0] : name);
    for (int i = 1; args[i] != NULL && rc == 0; i++)
        rc = execspec_add_arg(&spec, args[i]);
    if (rc < 0) {
        (void)fprintf(stderr, "%s: %s\n", name, strerror(-rc));
        exit(1);
    }
    front = (struct front){.spec = &spec, .timeout_ms = TIMEOUT_MS, .group_fd = -1};
    struct front_result result = front_run(&front, socket != NULL ? socket : VHPC_CALL_SOCKET);
    front_exit_as(&result, name);
}
