/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections of programs in this guest to a server that Slurm has on the node: each becomes a host
 * call of a session, and the host decides which address it reaches.
 */
#ifndef VHPC_AGENT_LINK_H
#define VHPC_AGENT_LINK_H

#include "agent.h"
#include "pmixwatch.h"

struct link_kind {
    char *call; /* argv[0] of the host calls: VHPC_CALL_* */
    /* As in exchange.h; may be NULL. */
    bool (*pass)(struct exchange *, uint8_t number, const uint8_t *data, size_t len);
    /* The host has sent this ERROR; NULL: the program finds its connection closed. */
    void (*failed)(struct session *, const struct frame *);
};

struct link {
    struct link *next;
    struct session *session; /* NULL: it is over */
    struct exchange exchange;
    const struct link_kind *kind;
    struct pmixwatch watch; /* what a program of PMIx asks */
    bool ended;             /* on the host: what is left is written */
};

/* Relay a connection that was accepted, for a running session; it is closed if that fails. */
void link_open(struct session *s, int fd, const struct link_kind *kind);
/* A frame of the host for a call of the session. 1 if the call is not one of these, 0 or -errno. */
int link_frame(struct session *s, const struct frame *f);
/* How many of this kind the session has. */
uint32_t links_count(const struct session *s, const struct link_kind *kind);
/* Close all links of the session. */
void links_close(const struct session *s);
/* Free closed links; between two turns of the loop. */
void links_sweep(struct agent *a);

#endif
