/* SPDX-License-Identifier: Apache-2.0 */
#include "memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"

#define VARIABLE "VHPC_MEM_MB="

void memory_score(const char *score)
{
    (void)write_existing("/proc/self/oom_score_adj", score);
}

uint64_t memory_available(const char *file)
{
    static const char name[] = "MemAvailable:";
    char line[256];
    uint64_t kib = 0;
    FILE *f = fopen(file, "re");
    if (f == NULL)
        return 0;
    while (kib == 0 && fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, name, sizeof name - 1) == 0)
            kib = strtoull(line + sizeof name - 1, NULL, 10);
    (void)fclose(f);
    return kib / 1024;
}

int memory_environment(struct agent *a, struct execspec *spec)
{
    char entry[sizeof VARIABLE + 24];
    execspec_drop_env(spec, VARIABLE);
    if (a->memory_mib == 0)
        a->memory_mib = memory_available("/proc/meminfo");
    if (a->memory_mib == 0)
        return 0;
    (void)snprintf(entry, sizeof entry, VARIABLE "%" PRIu64, a->memory_mib);
    return execspec_add_env(spec, entry);
}
