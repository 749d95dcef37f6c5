/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A byte queue in one block of memory.
 *
 * The caller bounds its size, because only the caller knows what the bytes mean (a credit window, a
 * message limit).
 */
#ifndef VHPC_BUF_H
#define VHPC_BUF_H

#include <stddef.h>
#include <stdint.h>

struct buf {
    uint8_t *data;
    size_t head; /* first unread byte */
    size_t len;  /* unread bytes */
    size_t cap;
};

/* Make room for `need` more bytes after the unread ones; 0 or -ENOMEM. */
int buf_reserve(struct buf *b, size_t need);
/* Append; 0 or -ENOMEM, in which case nothing was appended. */
int buf_append(struct buf *b, const void *data, size_t len);
/* Remove `len` <= b->len bytes from the front. */
void buf_consume(struct buf *b, size_t len);
/* Free the memory; the queue is empty and usable again. */
void buf_free(struct buf *b);

/* First unread byte, NULL if the queue never had any; valid until the queue is changed. */
static inline const uint8_t *buf_head(const struct buf *b)
{
    return b->data == NULL ? NULL : b->data + b->head;
}

#endif
