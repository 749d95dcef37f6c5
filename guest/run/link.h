/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections to a server that Slurm has for a step on this node. For each connection of a program
 * to the agent, the agent makes a host call that names the kind of server; it is relayed to the
 * address of that server and to no other.
 */
#ifndef VHPC_RUN_LINK_H
#define VHPC_RUN_LINK_H

#include <netinet/in.h>
#include <stdbool.h>

#include "exchange.h"

/* It listens on the node's loopback interface. */
struct link_server {
    const char *name; /* in messages */
    union {
        struct sockaddr any;
        struct sockaddr_in in;
        struct sockaddr_in6 in6;
    } at;
    socklen_t len; /* 0: none */
};

struct link {
    const struct link_server *server;
    struct exchange exchange;
    struct source connecting; /* fd -1: it is connected, or over */
    long long deadline;       /* ms */
    bool over;
};

/*
 * Answer a host call, whose EXEC has been checked by *flow. If the server cannot be reached, ERROR
 * is sent. *l must not move until it is over. 0 or -errno of the channel.
 */
int link_open(struct link *l, const struct link_server *server, struct loop *loop,
              struct chan *chan, uint32_t call, const struct flow *flow);
/* A frame of the agent after EXEC; 0 or -errno (-EPROTO: a violation). */
int link_frame(struct link *l, const struct frame *f);
/* Handles the deadline. */
void link_tick(struct link *l, long long now);

#endif
