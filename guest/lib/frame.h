/* SPDX-License-Identifier: Apache-2.0 */
/* The 16-byte frame header: length, type, fd, flags, session, call; little endian. */
#ifndef VHPC_FRAME_H
#define VHPC_FRAME_H

#include <stdint.h>

#include "protocol.h"

struct frame {
    uint32_t length; /* bytes of payload */
    uint8_t type;
    uint8_t fd;
    uint16_t flags;
    uint32_t session;
    uint32_t call;
    const uint8_t *payload; /* not owned */
};

static inline void put_le16(uint8_t *p, uint16_t v)
{
    p[0] = (uint8_t)(v & 0xff);
    p[1] = (uint8_t)(v >> 8);
}

static inline void put_le32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)((v >> (8 * i)) & 0xff);
}

static inline void put_le64(uint8_t *p, uint64_t v)
{
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)((v >> (8 * i)) & 0xff);
}

static inline uint16_t get_le16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static inline uint32_t get_le32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t get_le64(const uint8_t *p)
{
    return (uint64_t)get_le32(p) | (uint64_t)get_le32(p + 4) << 32;
}

void frame_pack(uint8_t out[VHPC_HEADER], const struct frame *f);
/* Decode a header; payload is left NULL. -EPROTO for an invalid one. */
int frame_unpack(const uint8_t in[VHPC_HEADER], struct frame *f);

#endif
