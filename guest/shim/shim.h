/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vhpc-shim: holds one guest's channel on the host, unprivileged.
 *
 * It trusts nobody: frames of the guest and of clients go through the same
 * rules (flow.h) before they are passed on. A guest that breaks them is
 * declared broken and its channel closed; a client that does is dropped.
 */
#ifndef VHPC_SHIM_H
#define VHPC_SHIM_H

#include <sys/types.h>

#include "chan.h"
#include "console.h"
#include "flow.h"
#include "hello.h"
#include "log.h"

struct shim;

struct host_call {
    uint32_t id; /* 0 = slot is free */
    struct flow flow;
};

struct client {
    struct client *next;
    struct shim *shim;
    struct chan chan;
    uid_t uid;
    pid_t pid; /* who connected; 0 = not known */
    uint32_t session;
    bool said_hello;
    bool known_to_agent; /* something was passed on: the agent must hear of the end */
    struct flow flow;    /* call 0 */
    struct host_call call[VHPC_CALLS_MAX];
    uint32_t last_call;
    uint32_t request_len; /* of the REQUEST being passed on */
    uint32_t reply_len;
    uint32_t requests_pending;
    uint32_t pings_pending;
    long long watched_until; /* after a SIGTSTP silence means that it was stopped; 0 = no matter */
    long long heard_at;
    bool silent;          /* so its program was stopped */
    long long stopped_at; /* when it was seen to be stopped, and its program was, too; 0 = is not */
};

enum { SHIM_WATCHED_MAX = 64 };

struct shim {
    struct loop loop;
    struct chan agent;
    struct source listener;
    struct source root_listener; /* which no user can keep busy; fd -1: none */
    struct source signals;
    struct console console;
    /* pidfds of processes that the guest cannot do without: the daemons of its shared folders */
    struct source watched[SHIM_WATCHED_MAX];
    size_t watched_count;
    struct log_pipe logs[SHIM_WATCHED_MAX];
    size_t log_count;
    long long crippled_ms; /* when one of them was seen to have ended; 0 = none has */
    uid_t uid;             /* the job's user */
    long long look_at;     /* when clients' states are looked at again, */
    uint32_t looked;       /* below this session; 0 = from the beginning */
    bool agent_up;
    struct hello agent_hello;
    struct client *clients;
    size_t client_count;
    uint32_t next_session;
    bool ended;
    bool runs_on;    /* the channel was ended by us, and not by the guest's end */
    bool terminated; /* by SIGTERM */
    int status;      /* exit status once ended */
};

enum { SHIM_AGENT_CLOSED = 0, SHIM_AGENT_BROKEN = 3 };

/* end.c: the guest has ended or violated the protocol: tell every client, accept no new ones. */
void shim_end(struct shim *s, int status, const char *text);

/* client.c: a new connection on a listening socket. */
void shim_accept(struct shim *s, int listener);
/* The same for a connection that is there already: zeroed *c takes over fd. 0 or -ENOMEM. */
int client_adopt(struct shim *s, struct client *c, int fd, uid_t uid);
/* The agent's HELLO has come: greet everybody who waits for it. */
void client_greet(struct client *c);
/* Drop a client now; its session in the guest is closed. Memory goes in shim_sweep(). */
void client_drop(struct client *c, const char *why);
struct client *client_find(const struct shim *s, uint32_t session);
struct host_call *client_call(struct client *c, uint32_t id);
/* Stop the programs of clients that seem to be stopped themselves; true while some are watched. */
bool shim_watch(struct shim *s, long long now);
/*
 * Stop the programs of clients that were stopped by a signal. Returns in how many ms it
 * is to be called again, -1 while no program runs.
 */
int shim_look(struct shim *s, long long now);
/* Free clients whose connection is closed; between two turns of the loop. */
void shim_sweep(struct shim *s);

/* agent.c: set up the agent's side of the channel; 0 or -errno. */
int shim_agent_open(struct shim *s, int fd);

#endif
