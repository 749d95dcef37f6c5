/* SPDX-License-Identifier: Apache-2.0 */
#include "tlv.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"

enum { TLV_HEADER = 8 };

int tlv_put(struct buf *b, uint16_t tag, const void *data, size_t len)
{
    uint8_t head[TLV_HEADER] = {0};
    if (len > VHPC_MESSAGE_MAX)
        return -EMSGSIZE;
    put_le16(head, tag);
    put_le32(head + 4, (uint32_t)len);
    int rc = buf_reserve(b, sizeof head + len);
    if (rc < 0)
        return rc;
    (void)buf_append(b, head, sizeof head);
    return buf_append(b, data, len);
}

int tlv_put_str(struct buf *b, uint16_t tag, const char *text)
{
    return tlv_put(b, tag, text, strlen(text));
}

int tlv_put_u32(struct buf *b, uint16_t tag, uint32_t value)
{
    uint8_t raw[4];
    put_le32(raw, value);
    return tlv_put(b, tag, raw, sizeof raw);
}

int tlv_put_u64(struct buf *b, uint16_t tag, uint64_t value)
{
    uint8_t raw[8];
    put_le64(raw, value);
    return tlv_put(b, tag, raw, sizeof raw);
}

int tlv_next(struct tlv_reader *r, struct tlv *out)
{
    if (r->left == 0)
        return 0;
    if (r->left < TLV_HEADER)
        return -EPROTO;
    out->tag = get_le16(r->p);
    out->len = get_le32(r->p + 4);
    out->data = r->p + TLV_HEADER;
    if (get_le16(r->p + 2) != 0 || out->len > r->left - TLV_HEADER)
        return -EPROTO;
    r->p += TLV_HEADER + out->len;
    r->left -= TLV_HEADER + out->len;
    return 1;
}

bool tlv_find(const uint8_t *data, size_t len, uint16_t tag, struct tlv *out)
{
    struct tlv_reader r = {data, len};
    while (tlv_next(&r, out) > 0)
        if (out->tag == tag)
            return true;
    return false;
}

int tlv_u32(const struct tlv *t, uint32_t *out)
{
    if (t->len != 4)
        return -EPROTO;
    *out = get_le32(t->data);
    return 0;
}

int tlv_u64(const struct tlv *t, uint64_t *out)
{
    if (t->len != 8)
        return -EPROTO;
    *out = get_le64(t->data);
    return 0;
}

int tlv_str(const struct tlv *t, char **out)
{
    if (t->len > 0 && memchr(t->data, 0, t->len) != NULL)
        return -EPROTO;
    char *copy = malloc((size_t)t->len + 1);
    if (copy == NULL)
        return -ENOMEM;
    if (t->len > 0)
        memcpy(copy, t->data, t->len);
    copy[t->len] = '\0';
    free(*out);
    *out = copy;
    return 0;
}

int tlv_bytes(const struct tlv *t, uint8_t **out, size_t *len)
{
    if (t->len == 0)
        return 0;
    uint8_t *copy = malloc(t->len);
    if (copy == NULL)
        return -ENOMEM;
    memcpy(copy, t->data, t->len);
    free(*out);
    *out = copy;
    *len = t->len;
    return 0;
}

int tlv_str_into(const struct tlv *t, char *out, size_t size)
{
    if (t->len >= size || (t->len > 0 && memchr(t->data, 0, t->len) != NULL))
        return -EPROTO;
    if (t->len > 0)
        memcpy(out, t->data, t->len);
    out[t->len] = '\0';
    return 0;
}
