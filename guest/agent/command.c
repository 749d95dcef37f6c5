/*
 * This binary under another name (srun, scontrol, ...): the command runs on
 * the host, as the job's user, and this process stands for it.
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
    int rc = front_describe_self(&spec);
    if (rc == 0)
        rc = execspec_add_arg(&spec, name);
    for (int i = 1; i < argc && rc == 0; i++)
        rc = execspec_add_arg(&spec, argv[i]);
    if (rc < 0) {
        (void)fprintf(stderr, "%s: %s\n", name, strerror(-rc));
        exit(1);
    }
    front = (struct front){.spec = &spec, .timeout_ms = TIMEOUT_MS};
    struct front_result result = front_run(&front, socket != NULL ? socket : VHPC_CALL_SOCKET);
    front_exit_as(&result, name);
}
