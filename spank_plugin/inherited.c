/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: A submitted job inherits no image */
#include "inherited.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME_SIZE 128

extern char **environ;

/* Each lists as NAME=VALUE what the guest's agent has set (guest/agent/defaults.c). */
static const char *const marks[] = {"VHPC_FABRIC", "VHPC_INTERFACE"};
static const char topology[] = "/run/vhpc/nccl-topology.xml"; /* as VHPC_TOPOLOGY_FILE */

/* word is NAME=VALUE; it need not end with a NUL. */
static void forget_word(const char *word, size_t length)
{
    char name[NAME_SIZE];
    const char *equal = memchr(word, '=', length);
    const char *value;
    size_t name_length;

    if (equal == NULL || (name_length = (size_t)(equal - word)) >= sizeof name)
        return;
    memcpy(name, word, name_length);
    name[name_length] = '\0';
    value = getenv(name);
    length -= name_length + 1;
    if (value != NULL && strlen(value) == length && memcmp(value, equal + 1, length) == 0)
        (void)unsetenv(name);
}

/* The numbers of GPUs on the node that the guest is on. */
static bool forget_one_host_number(void)
{
    static const char prefix[] = "VHPC_HOST_";
    char name[NAME_SIZE];

    for (char **entry = environ; entry != NULL && *entry != NULL; entry++) {
        size_t length = strcspn(*entry, "=");

        if (strncmp(*entry, prefix, sizeof prefix - 1) != 0 || length >= sizeof name)
            continue;
        memcpy(name, *entry, length);
        name[length] = '\0';
        return unsetenv(name) == 0;
    }
    return false;
}

static void forget_marked(const char *mark)
{
    const char *listed = getenv(mark);
    char *words = listed == NULL ? NULL : strdup(listed);

    for (const char *word = words; word != NULL && *word != '\0';) {
        size_t length = strcspn(word, " ");

        forget_word(word, length);
        word += length + strspn(word + length, " ");
    }
    free(words);
    (void)unsetenv(mark);
}

void vhpc_forget_guest(void)
{
    static const char *const names[] = {
        "VHPC_JOB_GENERATION",
        "VHPC_JOB_IMAGE",
        "VHPC_JOB_GUESTS",
        "VHPC_GUEST",
        "VHPC_NODELIST",
        "VHPC_PKEY",
        "VHPC_SESSION",
        "VHPC_CWD",
        "VHPC_HOSTFILE",
        "VHPC_MACHINEFILE",
        "VHPC_MEM_MB",
        "VHPC_CLUSTER_NAME",
        "VHPC_CLUSTER_JOB",
        "VHPC_CLUSTER_HOSTFILE",
        "VHPC_CLUSTER_MACHINEFILE",
    };
    const char *file = getenv("NCCL_TOPO_FILE");

    for (size_t i = 0; i < sizeof marks / sizeof marks[0]; i++)
        forget_marked(marks[i]);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        (void)unsetenv(names[i]);
    if (file != NULL && strcmp(file, topology) == 0)
        (void)unsetenv("NCCL_TOPO_FILE");
    while (forget_one_host_number())
        ;
}
