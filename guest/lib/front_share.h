/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The client's end of the memory that it shares with the shim (ring.h). It is asked for when a
 * program has written much to a file: memory and calls would be wasted on others.
 */
#ifndef VHPC_FRONT_SHARE_H
#define VHPC_FRONT_SHARE_H

#include <stdbool.h>

#include "exchange.h"
#include "ring.h"

struct front_share {
    bool offered; /* the shim's HELLO says that it can share memory */
    bool asked;
    uint64_t seen; /* bytes of large frames that have come through the socket */
    struct ring ring;
};

/*
 * To be called for each frame of the program. 0: it was handled; 1: the caller must handle *f,
 * which is DATA instead of SHARED; -EPROTO: x->flow.why has the reason; <0: -errno.
 */
int front_share_frame(struct front_share *s, struct exchange *x, struct frame *f);

#endif
