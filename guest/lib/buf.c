/* SPDX-License-Identifier: Apache-2.0 */
#include "buf.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int buf_reserve(struct buf *b, size_t need)
{
    if (b->head + b->len + need <= b->cap && b->data != NULL)
        return 0;
    if (b->head > 0 && b->data != NULL) {
        memmove(b->data, b->data + b->head, b->len);
        b->head = 0;
    }
    if (b->len + need <= b->cap && b->data != NULL)
        return 0;
    size_t cap = b->cap > 0 ? b->cap : 4096;
    while (cap < b->len + need)
        cap *= 2;
    uint8_t *data = realloc(b->data, cap);
    if (data == NULL)
        return -ENOMEM;
    b->data = data;
    b->cap = cap;
    return 0;
}

int buf_append(struct buf *b, const void *data, size_t len)
{
    if (len == 0)
        return 0;
    int rc = buf_reserve(b, len);
    if (rc < 0)
        return rc;
    memcpy(b->data + b->head + b->len, data, len);
    b->len += len;
    return 0;
}

void buf_consume(struct buf *b, size_t len)
{
    b->head += len;
    b->len -= len;
    if (b->len > 0)
        return;
    b->head = 0;
    /* Do not keep the memory of a burst until the end of the session. */
    if (b->cap > (1u << 20))
        buf_free(b);
}

void buf_free(struct buf *b)
{
    free(b->data);
    *b = (struct buf){0};
}
