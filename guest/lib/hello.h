/* SPDX-License-Identifier: Apache-2.0 */
/* HELLO: protocol versions; from the agent also its version and its kernel. */
#ifndef VHPC_HELLO_H
#define VHPC_HELLO_H

#include <stdint.h>

#include "chan.h"

struct hello {
    uint32_t version_min;
    uint32_t version_max;
    uint32_t state;  /* VHPC_STATE_*; meaningful from the shim only */
    uint32_t shares; /* 1: a shim that can share memory with its client */
    char agent_version[64];
    char boot_id[64];
    char kernel[128];
};

/* Only this end's versions. */
void hello_init(struct hello *h);
int hello_send(struct chan *c, const struct hello *h);
/* 0, or -EPROTO if the payload is not a HELLO. */
int hello_parse(const struct frame *f, struct hello *h);
/* The highest version that both support, or 0. */
uint32_t hello_version(const struct hello *peer);

/* Send ERROR with its kind, a Linux errno and one line of text. */
int error_send(struct chan *c, uint32_t session, uint32_t call, uint32_t kind, int number,
               const char *text);

struct error_info {
    uint32_t kind;
    uint32_t number;
    char text[1024];
};

int error_parse(const struct frame *f, struct error_info *e);

#endif
