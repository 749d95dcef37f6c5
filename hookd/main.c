/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PrologSlurmctld and EpilogSlurmctld: run as SlurmUser on the host of slurmctld, one for each job.
 *
 * Their work is done in Python, whose start costs more than all the rest.  vhpc-hookd has started
 * already and does it.  Nothing depends on that process: without it, or when it ends in the middle,
 * the hook runs in a Python of its own.  A hook may be run twice without harm.
 */
#include <errno.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ask.h"

enum {
    /* far longer than all deadlines inside of a hook together */
    LONGEST_MS = 30 * 60 * 1000,
};

static char *const *python(const char *word)
{
    static char *arguments[] = {
        VHPC_PYTHON, "-I", "-m", "vhpc_slurm.hooks.start", "vhpc_slurm.hooks.slurmctld", NULL, NULL,
    };
    static char copy[32];

    (void)snprintf(copy, sizeof(copy), "%s", word);
    arguments[5] = copy;
    return arguments;
}

/* A component of a heterogeneous job without guests: others may wait for it; it waits for no
 * other. */
static int without_guests(void)
{
    static const char word[] = "without-guests";
    char *const *arguments = python(word);
    pid_t child;

    int status = ask_hookd(VHPC_HOOKD_SOCKET, word, environ, LONGEST_MS);

    if ((status == ASK_NOT_RUN || status == ASK_KILLED) &&
        posix_spawn(&child, arguments[0], NULL, NULL, arguments, environ) == 0)
        (void)waitpid(child, NULL, 0);
    return 0;
}

int main(void)
{
    static const char word[] = VHPC_WORD;
    const char *leader = getenv("SLURM_HET_JOB_ID");
    char *const *arguments;
    int status;

    if (getenv("SPANK_VHPC_IMAGE") == NULL) {
        bool tells = strcmp(word, "prolog") == 0 && leader != NULL && leader[0] != '\0';
        return tells ? without_guests() : 0;
    }
    status = ask_hookd(VHPC_HOOKD_SOCKET, word, environ, LONGEST_MS);
    if (status >= 0)
        return status;
    if (status == ASK_TOO_LONG) {
        (void)fprintf(stderr, "vhpc %s-slurmctld: vhpc-hookd did not end the hook in time\n", word);
        return 1;
    }
    arguments = python(word);
    (void)execv(arguments[0], arguments);
    (void)fprintf(stderr, "vhpc %s-slurmctld: cannot run %s: %s\n", word, arguments[0],
                  strerror(errno));
    return 1;
}
