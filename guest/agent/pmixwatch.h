/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Watches a program's requests to the PMIx server on one connection for operations that Slurm's
 * server does not offer. Everything passes unchanged; this only reads.
 *
 * Each message has a header of 16 bytes and then its content, since PMIx 2. The content of a
 * request begins with the number of a command, which libraries of all versions have in common; how
 * it is encoded depends on the version. Bytes that do not look like PMIx are not read.
 */
#ifndef VHPC_AGENT_PMIXWATCH_H
#define VHPC_AGENT_PMIXWATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    PMIXWATCH_HEADER = 16,
    PMIXWATCH_CONTENT = 1024, /* as much of a message as is read: it has the name of a port */
};

enum pmixwatch_found {
    PMIXWATCH_NOTHING,
    PMIXWATCH_SPAWN,
    PMIXWATCH_ACCEPT, /* Open MPI publishes the name of the port with ":accept" */
    PMIXWATCH_CONNECT,
};

struct pmixwatch {
    uint8_t head[PMIXWATCH_HEADER + PMIXWATCH_CONTENT];
    size_t have;   /* bytes in head */
    uint64_t skip; /* bytes up to the end of a message */
    bool greeted;  /* the first message has come, which has no command */
    bool over;     /* not PMIx: read no more */
};

/* The next bytes that the program sends; the first thing that is not offered in them. */
enum pmixwatch_found pmixwatch_read(struct pmixwatch *w, const uint8_t *data, size_t len);

#endif
