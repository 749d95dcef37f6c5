/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Watches a program's requests to Slurm's PMI server (PMI-1 and PMI-2) for operations that the
 * server does not offer. Everything passes unchanged; this only reads.
 *
 * PMI-1 has lines. PMI-2 begins with a line of PMI-1, "cmd=init pmi_version=2 ...", and then has
 * messages after their length in six characters.
 */
#ifndef VHPC_AGENT_PMIWATCH_H
#define VHPC_AGENT_PMIWATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    PMIWATCH_HEAD = 48, /* bytes of a line or message that say what it is */
};

enum pmiwatch_found {
    PMIWATCH_NOTHING,
    PMIWATCH_SECOND_INIT, /* the server closes the connection when a program has finalized */
    PMIWATCH_SPAWN,
};

struct pmiwatch {
    char head[PMIWATCH_HEAD];
    size_t have;    /* bytes in head */
    uint64_t skip;  /* bytes up to the end of a message of PMI-2 */
    bool skip_line; /* ... or up to the end of a line */
    bool messages;  /* PMI-2 */
    bool begun;     /* a program has asked for "init" */
    bool over;      /* not PMI-1 and not PMI-2: read no more */
};

/* The next bytes that the program sends; the first thing that is not offered in them. */
enum pmiwatch_found pmiwatch_read(struct pmiwatch *w, const uint8_t *data, size_t len);

#endif
