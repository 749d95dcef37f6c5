/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames between `vhpc forward` on a login host and `vhpc-agent --forward` in a guest, over the
 * standard streams of a step.  docs/guest-protocol.md has the rules.
 *
 * A frame is an 8-byte header (type, 0, length of the payload, channel; little endian), the
 * payload, and a line feed: slurmstepd keeps output back until a line is complete.
 */
#ifndef VHPC_FORWARD_WIRE_H
#define VHPC_FORWARD_WIRE_H

#include <stdint.h>

enum {
    FORWARD_HEADER = 8,
    FORWARD_DATA_MAX = 16384, /* bytes of a payload */
    FORWARD_FRAME_MAX = FORWARD_HEADER + FORWARD_DATA_MAX + 1,
    FORWARD_WINDOW = 131072, /* bytes that one side sends on a channel without a CREDIT */
    FORWARD_CHANNELS = 128,  /* connections at a time */
    FORWARD_VERSION = 1,
};

enum forward_type {
    FORWARD_HELLO = 1, /* guest: version, and whether a program listens on the port */
    FORWARD_OPEN,      /* host: connect to the port, for a new channel */
    FORWARD_OPENED,    /* guest: connected */
    FORWARD_DATA,
    FORWARD_EOF,    /* the sender sends no more DATA on the channel */
    FORWARD_CREDIT, /* number of bytes that were taken from the channel */
    FORWARD_CLOSE,  /* errno: the channel ends at once */
    FORWARD_TYPES,
};

struct forward_frame {
    uint8_t type;
    uint16_t length;
    uint32_t channel;
    const uint8_t *payload; /* not owned */
};

/* Write header, payload and line feed; returns their length. */
uint32_t forward_pack(uint8_t out[FORWARD_FRAME_MAX], const struct forward_frame *f);
/*
 * Read a frame from the beginning of `len` bytes. Returns its length, 0 if it is not complete, or
 * -EPROTO.
 */
int forward_unpack(const uint8_t *in, uint32_t len, struct forward_frame *f);

#endif
