/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The requests of a program on one connection to its PMIx server that change the server's
 * state. After a checkpoint the tasks of its step have another server, which has to be told the
 * same.
 *
 * A commit has all values that the program has put, so only the last one is kept. Fences are not: a
 * server asks the others for values that it lacks, and they wait until the task has committed.
 */
#ifndef VHPC_AGENT_PMIXRECORD_H
#define VHPC_AGENT_PMIXRECORD_H

#include "pmixmessage.h"

enum {
    PMIXRECORD_MAX = 64 << 10,      /* bytes that are kept */
    PMIXRECORD_OPEN_MAX = 16 << 10, /* requests that wait for an answer */
};

struct pmixrecord_open {
    uint32_t tag;
    enum pmix_command command;
};

struct pmixrecord {
    struct buf kept;              /* the greeting and requests, whole */
    size_t commit, commit_len;    /* where the commit is in it; length 0: there was none */
    struct pmixrecord_open *open; /* requests that wait for an answer */
    size_t open_count, open_room;
    const char *lost; /* why it cannot be repeated, one clause; NULL: it can be */
};

void pmixrecord_greeting(struct pmixrecord *r, const uint8_t *message, size_t len);
void pmixrecord_request(struct pmixrecord *r, const uint8_t *message, size_t len);
/* A message of the server: the command that it answers, or PMIX_NO_COMMAND. */
enum pmix_command pmixrecord_answer(struct pmixrecord *r, const uint8_t *message);
/* One clause on why the program cannot get another server now; NULL: it can. */
const char *pmixrecord_obstacle(const struct pmixrecord *r);
void pmixrecord_lose(struct pmixrecord *r, const char *why);
void pmixrecord_free(struct pmixrecord *r);

#endif
