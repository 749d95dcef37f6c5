/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vhpc-shim: owns the channel of one guest on the host, unprivileged.
 *
 * It trusts neither side: frames of the guest and of clients are checked by the same rules (flow.h)
 * before they are passed on. If a guest violates them, its channel is closed; if a client does, the
 * client is dropped.
 */
#ifndef VHPC_SHIM_H
#define VHPC_SHIM_H

#include <sys/types.h>

#include "chan.h"
#include "console.h"
#include "flow.h"
#include "hello.h"
#include "log.h"
#include "ring.h"

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
    pid_t pid; /* peer of the connection; 0 = not known */
    uint32_t session;
    bool said_hello;
    bool known_to_agent; /* something was passed on: the agent must get CLOSE at the end */
    struct flow flow;    /* call 0 */
    struct ring ring;    /* memory shared with this client; see share.c */
    bool shares;         /* the client has mapped it */
    struct host_call call[VHPC_CALLS_MAX];
    uint32_t last_call;
    uint32_t request_len; /* of the REQUEST being passed on */
    uint32_t reply_len;
    uint32_t requests_pending;
    uint32_t pings_pending;
    long long watched_until; /* silence until then: it was stopped; 0 = not watched */
    long long heard_at;
    bool silent;          /* so SIGSTOP was sent for its program */
    long long stopped_at; /* SIGSTOP was sent for it at this time; 0 = it is not stopped */
    bool must_end;        /* it has passed SIGTERM on since the guest is held */
};

enum { SHIM_WATCHED_MAX = 64 };

struct shim {
    struct loop loop;
    struct chan agent;
    struct source listener;
    struct source root_listener; /* a user cannot fill its queue; fd -1: none */
    struct source signals;
    struct console console;
    /* pidfds of processes that the guest cannot work without: the daemons of its shared folders */
    struct source watched[SHIM_WATCHED_MAX];
    size_t watched_count;
    struct log_pipe logs[SHIM_WATCHED_MAX];
    size_t log_count;
    long long daemon_ended_ms; /* when one of them was found to have ended; 0 = none */
    uid_t uid;                 /* the job's user */
    long long check_at;        /* when the state of clients is checked again, */
    uint32_t checked_below;    /* below this session; 0 = from the beginning */
    bool agent_up;
    struct hello agent_hello;
    struct client *clients;
    size_t client_count;
    size_t clients_max; /* of the job's user; VHPC_CLIENTS_MAX, or fewer, as descriptors allow */
    size_t ring_count;  /* clients that memory is shared with */
    struct client *filling; /* a payload from the guest is being received into its ring */
    uint32_t next_session;
    bool ended;
    bool runs_on;    /* the shim has closed the channel, and the guest has not ended */
    bool terminated; /* by SIGTERM */
    bool held;       /* between SIGUSR1 and SIGUSR2: the guest may go, and clients are not told */
    bool lost;       /* ... and it has gone: what clients send is dropped */
    int status;      /* exit status once ended */
};

enum { SHIM_AGENT_CLOSED = 0, SHIM_AGENT_BROKEN = 3 };

/* end.c: the guest has ended or violated the protocol: inform all clients, accept no new ones. */
void shim_end(struct shim *s, int status, const char *text);
/* The guest's end has closed: the end, or silence while the guest is held. */
void shim_lose(struct shim *s);
/* SIGUSR1 and SIGUSR2. */
void shim_hold(struct shim *s, bool held);
/*
 * A client of a held guest has SIGTERM for its program: once the guest has gone, saved, the client
 * ends without a message.
 */
void shim_client_ends(struct client *c);

/* memory.c: keep the queues of all clients within their limit. */
void shim_limit_memory(struct shim *s);

/* client.c: a new connection on a listening socket. */
void shim_accept(struct shim *s, int listener);
/* The same for an existing connection: zeroed *c takes over fd. 0 or -ENOMEM. */
int client_adopt(struct shim *s, struct client *c, int fd, uid_t uid);
/* The agent's HELLO has come: send HELLO to a client that waits for it. */
void client_greet(struct client *c);
/* Drop a client now and close its session in the guest. shim_sweep() frees the memory. */
void client_drop(struct client *c, const char *why);
struct client *client_find(const struct shim *s, uint32_t session);
struct host_call *client_call(struct client *c, uint32_t id);
/* Stop the programs of clients that seem to be stopped themselves; true while any is watched. */
bool shim_check_silent(struct shim *s, long long now);
/*
 * Stop the programs of clients that were stopped by a signal. Returns the ms until it must be
 * called again, -1 while no program runs.
 */
int shim_check_stopped(struct shim *s, long long now);
/* Free clients whose connection is closed; between two turns of the loop. */
void shim_sweep(struct shim *s);

/*
 * share.c: a client asks for shared memory (SHARE), and says that it has mapped it (SHARED). 0 or
 * -errno, as on_frame.
 */
int share_asked(struct client *c, const struct frame *f);
int share_mapped(struct client *c, const struct frame *f);
/* The client's memory, if the payload of this frame of the guest may go there; or NULL. */
uint8_t *share_place(struct client *c, const struct frame *f);
/* Pass a frame of the guest on to the client, whose memory may have the payload already. */
int share_pass(struct client *c, const struct frame *f);
/* The client is about to be freed. */
void share_end(struct client *c);

/* agent.c: set up the agent's side of the channel; 0 or -errno. */
int shim_agent_open(struct shim *s, int fd);

#endif
