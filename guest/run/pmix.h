/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections to the PMIx server of a step, which is in slurmstepd and listens on the node's
 * loopback interface. For each connection of a program to the agent, the agent makes a host call
 * with the name PMIX_CALL; it is relayed to the server's address and to no other.
 */
#ifndef VHPC_RUN_PMIX_H
#define VHPC_RUN_PMIX_H

#include <netinet/in.h>
#include <stdbool.h>

#include "exchange.h"
#include "execspec.h"

struct pmix_server {
    union {
        struct sockaddr any;
        struct sockaddr_in in;
        struct sockaddr_in6 in6;
    } at;
    socklen_t len; /* 0: none */
};

struct pmix_link {
    struct exchange exchange;
    struct source connecting; /* fd -1: it is connected, or over */
    long long deadline;       /* ms */
    bool over;
};

/*
 * The address in PMIX_SERVER_URI*: "NAME;tcp4://127.0.0.1:PORT" or "NAME;tcp6://[::1]:PORT". False
 * if the variables have no address, different ones, or one that is not of the loopback interface.
 */
bool pmix_find(const struct execspec *spec, struct pmix_server *server);

/*
 * Answer a host call, whose EXEC has been checked by *flow. If the server cannot be reached, ERROR
 * is sent. *l must not move until it is over. 0 or -errno of the channel.
 */
int pmix_open(struct pmix_link *l, const struct pmix_server *server, struct loop *loop,
              struct chan *chan, uint32_t call, const struct flow *flow);
/* A frame of the agent after EXEC; 0 or -errno (-EPROTO: a violation). */
int pmix_frame(struct pmix_link *l, const struct frame *f);
/* Handles the deadline. */
void pmix_tick(struct pmix_link *l, long long now);

#endif
