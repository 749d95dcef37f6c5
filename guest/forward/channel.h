/* SPDX-License-Identifier: Apache-2.0 */
/* Channels of `vhpc forward` and `vhpc ssh`: one for each connection to a TCP port or a program. */
#ifndef VHPC_FORWARD_CHANNEL_H
#define VHPC_FORWARD_CHANNEL_H

#include <stdbool.h>

#include "buf.h"
#include "loop.h"
#include "wire.h"

struct forward_channel {
    struct source socket;
    struct forward *forward;
    uint32_t id; /* 0 = not in use */
    bool connected;
    bool eof_in;     /* the host sends no more */
    bool shut;       /* the program was told so */
    bool eof_out;    /* the program sends no more */
    uint32_t credit; /* bytes that may be sent to the host */
    uint32_t taken;  /* bytes given to the program since the last CREDIT */
    struct buf in;   /* from the host, for the program */
    unsigned tried;  /* addresses */
};

struct forward {
    struct loop loop;
    struct source input, output; /* from and to the host */
    struct buf in, out;
    struct forward_channel channel[FORWARD_CHANNELS];
    uint32_t last; /* highest id that was opened */
    uint16_t port;
    char **program; /* with its arguments, in place of a port */
    /* A socket that connects to address number `try` (0, 1, ...), or -errno. */
    int (*dial)(const struct forward *, unsigned try);
    const char *why; /* of -EPROTO */
    bool ended;      /* the host has closed its end */
};

/* Take bytes of the host; 0, -ENOMEM or -EPROTO. */
int forward_feed(struct forward *f, const uint8_t *data, size_t len);
/* Close all connections. */
void forward_free(struct forward *f);

#endif
