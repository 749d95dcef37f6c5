/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vhpc-node-hook prolog|epilog: Prolog and Epilog of a job with guests; run as root on a compute
 * node.
 *
 * Their work is done in Python, whose start and imports take longer than most of the rest.  After
 * an Epilog a process with these modules in memory waits for the next hooks for some time, and runs
 * them. Nothing depends on that process: without it the hook runs in a Python of its own.  A hook
 * that was killed there is reported to slurmd as killed, as one in a process of its own would be.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ask.h"

int main(int argc, char **argv)
{
    static const char prolog[] = "prolog";
    const char *word = argc == 2 ? argv[1] : "";
    char module[] = "vhpc_slurm.hooks.prolog";
    char *arguments[] = {
        VHPC_PYTHON, "-I", "-m", "vhpc_slurm.hooks.start", module, NULL,
    };
    int status;

    if (strcmp(word, prolog) != 0 && strcmp(word, "epilog") != 0) {
        (void)fputs(
            "usage: vhpc-node-hook prolog|epilog; Slurm runs it through Prolog and Epilog\n",
            stderr);
        return 2;
    }
    /* both words have the same length */
    memcpy(module + sizeof(module) - sizeof(prolog), word, sizeof(prolog));
    /* slurmd has a limit of its own for hooks, and ends this program */
    status = ask_hookd(VHPC_NODE_SOCKET, word, environ, ASK_NO_LIMIT);
    if (status >= 0)
        return status;
    if (status == ASK_KILLED) {
        (void)raise(SIGKILL);
        return 1;
    }
    (void)execv(arguments[0], arguments);
    (void)fprintf(stderr, "vhpc %s: cannot run %s: %s\n", word, arguments[0], strerror(errno));
    return 1;
}
