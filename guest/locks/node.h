/* SPDX-License-Identifier: Apache-2.0 */
/* The broker's end of its port: one request at a time, whose answer is waited for. */
#ifndef VHPC_LOCKS_NODE_H
#define VHPC_LOCKS_NODE_H

#include <stdbool.h>

#include "wire.h"

struct locks_node {
    int fd;
    int interrupt; /* readable: wait for no answer any more; 0: there is none */
    uint32_t last; /* id of the last request */
    uint8_t in[LOCKS_REPLY + LOCKS_TEXT_MAX + 1];
};

/*
 * Ask; the request's id is filled in. The reply's text ends with a NUL, and is valid until the next
 * call. 0, or -EIO: the node does not answer or not by the protocol, and the port is closed.
 */
int node_ask(struct locks_node *n, struct locks_request *r, struct locks_reply *reply);
/* Open the port again; 0 or -errno: the host has not. */
int node_open(struct locks_node *n, const char *path);
void node_close(struct locks_node *n);

#endif
