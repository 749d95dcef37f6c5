/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A byte queue in one piece of memory.
 *
 * It grows as it is told to; the bound on its size is the caller's, who knows
 * what the bytes mean (a credit window, a message limit).
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

/* Room for `need` more bytes behind the unread ones; 0 or -ENOMEM. */
int buf_reserve(struct buf *b, size_t need);
/* Append; 0 or -ENOMEM, in which case nothing was appended. */
int buf_append(struct buf *b, const void *data, size_t len);
/* Drop `len` <= b->len bytes from the front. */
void buf_consume(struct buf *b, size_t len);
/* Give the memory back; the queue is empty and usable again. */
void buf_free(struct buf *b);

/* First unread byte, NULL of a queue that never held any; valid until the queue is changed. */
static inline const uint8_t *buf_head(const struct buf *b)
{
    return b->data == NULL ? NULL : b->data + b->head;
}

#endif
