/* SPDX-License-Identifier: Apache-2.0 */
/*
 * srun --cpu-bind: slurmstepd binds this process to CPUs of the node. Each CPU of the guest is
 * pinned to one of them, so the task can be bound to the same cores in the guest.
 */
/* Decision: A task's CPUs follow its relay */
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "run.h"

enum { HOST_CPUS_MAX = 8192 };

static bool read_number(const char **text, unsigned long *number)
{
    char *rest;
    errno = 0;
    *number = strtoul(*text, &rest, 10);
    if (rest == *text || errno != 0 || (*rest != ':' && *rest != '\0'))
        return false;
    *text = *rest == ':' ? rest + 1 : rest;
    return true;
}

void run_bind(struct execspec *spec)
{
    const char *pins = getenv("VHPC_RUN_CPUS");
    size_t size = CPU_ALLOC_SIZE(HOST_CPUS_MAX), bound = 0, cpus = 0;
    cpu_set_t *own = CPU_ALLOC(HOST_CPUS_MAX);
    unsigned long host;
    spec->affinity_len = 0;
    memset(spec->affinity, 0, sizeof spec->affinity);
    if (pins != NULL && own != NULL && sched_getaffinity(0, size, own) == 0) {
        for (; *pins != '\0' && cpus < EXEC_CPUS_MAX && read_number(&pins, &host); cpus++) {
            if (host >= HOST_CPUS_MAX || !CPU_ISSET_S(host, size, own))
                continue;
            spec->affinity[cpus / 8] |= (uint8_t)(1U << cpus % 8);
            bound++;
        }
        if (bound > 0 && bound < cpus && *pins == '\0')
            spec->affinity_len = (cpus + 7) / 8;
    }
    CPU_FREE(own);
}
