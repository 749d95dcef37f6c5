/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The reach operation: whether other guests answer packets of full size on the network of the job.
 * The agent sends ICMP echo requests that may not be fragmented, and repeats them until each target
 * has answered or the time is over.
 */
#ifndef VHPC_REACH_H
#define VHPC_REACH_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "agent.h"

enum {
    REACH_TARGETS_MAX = 8,
    REACH_SIZE_MIN = 1280, /* bytes of an IP packet; RFC 8200 */
    REACH_SIZE_MAX = 65535,
    REACH_WAIT_MAX_MS = 600000,
    REACH_AGAIN_MS = 100, /* between two requests to a target that has not answered */
};

struct reach_target {
    char name[INET6_ADDRSTRLEN];
    int family;
    union {
        struct sockaddr any;
        struct sockaddr_in in;
        struct sockaddr_in6 in6;
    } address;
    bool answered;
    int error; /* errno of the last request that could not be sent; 0: it was sent */
};

/* Fields of the request, as they came. */
struct reach_want {
    char target[REACH_TARGETS_MAX][INET6_ADDRSTRLEN];
    size_t count;
    uint32_t size;
    uint32_t wait_ms;
};

struct reach {
    struct reach_target target[REACH_TARGETS_MAX];
    size_t count;
    uint32_t size;
    struct source source[2]; /* sockets for IPv4 and IPv6; fd -1: none */
    uint16_t sequence;
    long long until; /* ms */
    long long next;  /* when requests are sent again */
    uint32_t session;
    uint32_t request;
};

/* Check the fields and fill targets and size. 0, or -EINVAL with one line in text. */
int reach_parse(const struct reach_want *want, struct reach *r, char *text, size_t size);
/* Open the sockets that the targets need. 0, or -errno with one line in text. */
int reach_open(struct reach *r, char *text, size_t size);
/* Send a request to each target that has not answered. */
void reach_send(struct reach *r);
/* Take the answers that have arrived at one of the sockets. */
void reach_receive(struct reach *r, size_t which);
bool reach_complete(const struct reach *r);
/* One clause for each target that has not answered: its address and why. */
void reach_describe(const struct reach *r, char *text, size_t size);
void reach_close(struct reach *r, struct loop *l);

/*
 * The operation: begin (0: the reply follows; or -errno with one line in text), continue between
 * two turns of the loop, and stop when the client has disconnected.
 */
int reach_ask(struct session *s, uint32_t request, const struct reach_want *want, char *text,
              size_t size);
int reach_tick(struct agent *a, long long now, bool *work);
void reach_forget(struct agent *a, const struct session *s);

#endif
