/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that the shim shares with one client, for the output of the client's program.
 *
 * The shim reads the payload of a large DATA frame from the guest's port directly into it and sends
 * the client only the length; the client writes the bytes to their file from there. Through the
 * client's socket they would be copied twice more, and the kernel would allocate and free the
 * memory between.
 *
 * Payloads lie one after the other. As many bytes as a window has fit, so credit (flow.h) is also
 * what keeps the shim from overwriting bytes that the client has not written yet.
 */
#ifndef VHPC_RING_H
#define VHPC_RING_H

#include <stddef.h>
#include <stdint.h>

#include "protocol.h"

enum {
    RING_BYTES = VHPC_WINDOW,
    /* The kernel lets the shim make no file that is larger than its log may become (256 KiB). */
    RING_PARTS = 4,
    RING_FD = 1,         /* only this fd of a program has shared memory: its standard output */
    RING_MIN = 16 << 10, /* payloads below this are sent through the socket */
};

/* Mapped twice in a row, so that a payload that passes the end is in one piece. */
struct ring {
    uint8_t *at; /* NULL if no memory is shared */
    size_t next; /* offset of the next payload */
};

/*
 * The shim's end: make the memory and its descriptors, which are for the client and which the
 * caller closes. The client can only read it, from Linux 5.1; before, it can spoil its own output.
 * 0 or -errno.
 */
int ring_make(struct ring *r, int fd[RING_PARTS]);
/* The client's end; does not close the descriptors. 0 or -errno. */
int ring_map(struct ring *r, const int fd[RING_PARTS]);
void ring_free(struct ring *r);

/* Room for the next payload, or the payload that is there. */
static inline uint8_t *ring_next(const struct ring *r)
{
    return r->at + r->next;
}

static inline void ring_advance(struct ring *r, uint32_t length)
{
    r->next = (r->next + length) % RING_BYTES;
}

#endif
