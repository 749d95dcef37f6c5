/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Structured payloads: a sequence of (u16 tag, u16 zero, u32 length, bytes). Readers skip unknown
 * tags, so that a version can be extended.
 */
#ifndef VHPC_TLV_H
#define VHPC_TLV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"

struct tlv {
    uint16_t tag;
    uint32_t len;
    const uint8_t *data;
};

struct tlv_reader {
    const uint8_t *p;
    size_t left;
};

/* Writers: 0 or -ENOMEM. Strings go without their NUL. */
int tlv_put(struct buf *b, uint16_t tag, const void *data, size_t len);
int tlv_put_str(struct buf *b, uint16_t tag, const char *text);
int tlv_put_u32(struct buf *b, uint16_t tag, uint32_t value);
int tlv_put_u64(struct buf *b, uint16_t tag, uint64_t value);

/* Next element: 1, 0 at the end, -EPROTO if it is longer than the rest. */
int tlv_next(struct tlv_reader *r, struct tlv *out);
/* The first element with this tag. */
bool tlv_find(const uint8_t *data, size_t len, uint16_t tag, struct tlv *out);
/* A value of exactly four bytes, otherwise -EPROTO. */
int tlv_u32(const struct tlv *t, uint32_t *out);
int tlv_u64(const struct tlv *t, uint64_t *out);
/* A copy with a NUL at its end, to be freed; -EPROTO if the value has a NUL, -ENOMEM. */
int tlv_str(const struct tlv *t, char **out);
/* A copy in place of an earlier one, to be freed; -ENOMEM. An empty value keeps the earlier one. */
int tlv_bytes(const struct tlv *t, uint8_t **out, size_t *len);
/* tlv_str into a fixed array; -EPROTO also if it does not fit. */
int tlv_str_into(const struct tlv *t, char *out, size_t size);

#endif
