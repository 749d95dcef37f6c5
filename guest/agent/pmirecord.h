/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The requests of a program that change the state of its PMI server (PMI-1 and PMI-2). After a
 * checkpoint the tasks of its step have another server, which has to get the same requests.
 *
 * Each request has one answer. Of several fences only the last one is kept: all tasks have taken
 * part in as many, or one of them waits for its answer.
 */
#ifndef VHPC_AGENT_PMIRECORD_H
#define VHPC_AGENT_PMIRECORD_H

#include "buf.h"
#include "pmimessage.h"

enum {
    PMIRECORD_MESSAGE_MAX = 64 << 10,
    PMIRECORD_MAX = 64 << 10, /* bytes that are kept */
};

struct pmirecord_side {
    struct buf part; /* of a message that is not complete */
    bool fields;     /* messages of PMI-2 from now on */
    uint64_t count;  /* of messages */
};

struct pmirecord {
    struct pmirecord_side program, server;
    struct buf kept;         /* requests, whole */
    size_t fence, fence_len; /* where the last fence is in it; length 0: there was none */
    const char *lost;        /* why it cannot be repeated, one clause; NULL: it can be */
};

/* The next bytes that the program sends, or those that it gets. */
void pmirecord_program(struct pmirecord *r, const uint8_t *data, size_t len);
void pmirecord_server(struct pmirecord *r, const uint8_t *data, size_t len);
/* One clause on why the program cannot get another server now; NULL: it can. */
const char *pmirecord_obstacle(const struct pmirecord *r);
void pmirecord_free(struct pmirecord *r);

#endif
