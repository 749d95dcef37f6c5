/* SPDX-License-Identifier: Apache-2.0 */
/* hostcall.c, again.c: a command client of this guest and its call. */
#ifndef VHPC_CALLER_H
#define VHPC_CALLER_H

#include "agent.h"

enum { CALLER_SIGNALS_MAX = 8 };

struct caller {
    struct caller *next;
    struct agent *agent;
    struct chan chan;
    uint32_t session; /* its number */
    pid_t pid;        /* peer of the connection */
    uint32_t call;    /* 0 until its EXEC has begun; another one when it is issued again */
    struct flow flow; /* with the client, which sees one command without an end in between */
    bool said_hello;
    struct message message; /* its EXEC; kept if it can be issued again */

    struct step_mark mark; /* guest 0: it cannot be issued again */
    bool doubtful;         /* was issued before a hold: its end may be that of detached tasks */
    bool suspended;        /* has ended on the host only */
    bool restarting;       /* was issued again, and has not started */
    uint32_t status;       /* the highest exit code of its ends on the host */
    uint8_t signals[CALLER_SIGNALS_MAX]; /* that came meanwhile */
    size_t signal_count;
};

static inline bool caller_is_alive(const struct caller *c)
{
    return c->call != 0 && !flow_over(&c->flow) && !c->chan.closed;
}

#endif
