/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program's connection to its PMIx server. The program keeps it when a checkpoint gives the step
 * another server: the old one is told that the program has finalized, and the new one what the
 * program is and what it has put. From then on the namespace of the step is another one for the
 * server than for the program.
 */
#ifndef VHPC_AGENT_PMIXRELAY_H
#define VHPC_AGENT_PMIXRELAY_H

#include "loop.h"
#include "pmixrecord.h"

struct pmixrelay {
    /* Set by the caller: */
    struct loop *loop;
    bool (*is_quiet)(const struct pmixrelay *); /* true: the program is not read */
    void (*changed)(struct pmixrelay *);        /* it has left, or is told */
    void (*failed)(struct pmixrelay *);         /* its new server does not accept it */
    void *owner;

    /* Internal: */
    struct source program, server; /* fd -1: closed */
    struct buf from_program, to_server, from_server, to_program;
    struct pmixrecord record;
    enum {
        PMIXRELAY_PASSING,
        PMIXRELAY_LEAVING, /* the server was told, and has not answered yet */
        PMIXRELAY_LEFT,    /* no server */
        PMIXRELAY_TELLING, /* a new server, the answers are ours */
        PMIXRELAY_OVER,
    } phase;
    bool raw;       /* not PMIx: all passes unchanged */
    bool begun;     /* the greeting has come */
    size_t greeted; /* bytes of the answer to it that have come */
    size_t told;    /* bytes of the record that the new server knows */
    bool program_ended, server_ended;
    char own[PMIX_NAMESPACE_MAX + 1];   /* the namespace, for the program */
    char other[PMIX_NAMESPACE_MAX + 1]; /* for the server */
};

/*
 * Take over the program's end of a connection, non-blocking. `own` and `other` may be NULL: they
 * are the same then. Returns the descriptor of the server's side, or -errno; then fd is closed.
 */
int pmixrelay_start(struct pmixrelay *r, int fd, const char *own, const char *other);
/* One clause: why the program cannot get another server now; NULL: it can. */
const char *pmixrelay_obstacle(const struct pmixrelay *r);
/* Leave the server, of a parked program without an obstacle. True: it has left. */
bool pmixrelay_leave(struct pmixrelay *r);
/* It has left, and gets a new server; as pmixrelay_start(). */
int pmixrelay_renew(struct pmixrelay *r, const char *other);
void pmixrelay_close(struct pmixrelay *r);

#endif
