/* SPDX-License-Identifier: Apache-2.0 */
#include "pmi_filter.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mapping.h"

static bool has(const char *message, size_t len, const char *word)
{
    return memmem(message, len, word, strlen(word)) != NULL;
}

/* Whether the server speaks PMI-2 from now on. */
static bool begins_pmi_2(const char *message, size_t len)
{
    static const char init[] = "cmd=response_to_init ";
    return len >= sizeof init && memcmp(message, init, sizeof init - 1) == 0 &&
           has(message, len, " rc=0 ") && has(message, len, " pmi_version=2 ");
}

/* A message with another value at [at, at + old). */
static int put_changed(const struct pmi_filter *f, const char *message, size_t len, size_t at,
                       size_t old, const char *mapping, struct buf *out)
{
    char length[16];
    size_t skip = f->mode == PMI_MESSAGES ? PMI_LENGTH : 0;
    size_t new_len = strlen(mapping);
    int rc = 0;
    if (skip > 0) {
        (void)snprintf(length, sizeof length, "%-6u", (unsigned)(len - skip - old + new_len));
        rc = buf_append(out, length, PMI_LENGTH);
    }
    rc = rc < 0 ? rc : buf_append(out, message + skip, at - skip);
    rc = rc < 0 ? rc : buf_append(out, mapping, new_len);
    return rc < 0 ? rc : buf_append(out, message + at + old, len - at - old);
}

/* The mapping in a message: where it begins, and its length in *len; 0: there is none. */
static size_t find_mapping(const struct pmi_filter *f, const char *message, size_t *len)
{
    static const char in_line[] = " value=(vector,", in_fields[] = ";value=(vector,";
    const char *name = f->mode == PMI_LINES ? in_line : in_fields, *end = message + *len;
    const char *found = memmem(message, *len, name, sizeof in_line - 1);
    if (found == NULL)
        return 0;
    const char *value = found + strlen(" value="), *p = value;
    while (p < end && *p != ';' && *p != '\n' && *p != ' ')
        p++;
    *len = (size_t)(p - value);
    return (size_t)(value - message);
}

/* The complete message is in f->held. */
static int put_message(struct pmi_filter *f, struct buf *out)
{
    const char *message = (const char *)buf_head(&f->held);
    char mapping[MAPPING_TEXT_MAX + 1];
    size_t len = f->held.len, old = len, at = find_mapping(f, message, &old);
    int rc;
    if (at == 0) {
        rc = buf_append(out, message, len);
    } else {
        rc = mapping_divide(message + at, old, f->tasks, f->guests, mapping);
        rc = rc < 0 ? rc : put_changed(f, message, len, at, old, mapping, out);
    }
    if (f->mode == PMI_LINES && begins_pmi_2(message, len))
        f->mode = PMI_MESSAGES;
    buf_consume(&f->held, len);
    return rc;
}

/* How many of the next `len` bytes belong to the message in f->held; it may be complete then. */
static size_t want_more(struct pmi_filter *f, const uint8_t *data, size_t len, bool *complete)
{
    size_t have = f->held.len, want;
    *complete = false;
    if (f->mode == PMI_LINES) {
        const uint8_t *end = memchr(data, '\n', len);
        *complete = end != NULL;
        return end != NULL ? (size_t)(end - data) + 1 : len;
    }
    if (have < PMI_LENGTH)
        return len < PMI_LENGTH - have ? len : PMI_LENGTH - have;
    want = PMI_LENGTH + (size_t)pmi_length(buf_head(&f->held)) - have;
    *complete = len >= want;
    return *complete ? want : len;
}

/* The message is too long, or it is none: what was held passes, and perhaps what follows. */
static int let_pass(struct pmi_filter *f, size_t pass, struct buf *out)
{
    int rc = buf_append(out, buf_head(&f->held), f->held.len);
    buf_consume(&f->held, f->held.len);
    f->pass = pass;
    return rc;
}

/* A part of a message has come. */
static int add_part(struct pmi_filter *f, const uint8_t *data, size_t part, bool complete,
                    struct buf *out)
{
    int rc = buf_append(&f->held, data, part);
    if (rc < 0)
        return rc;
    if (f->mode == PMI_MESSAGES && !complete && f->held.len == PMI_LENGTH) {
        long length = pmi_length(buf_head(&f->held));
        if (length < 0) {
            f->mode = PMI_UNKNOWN;
            return let_pass(f, 0, out);
        }
        if (length == 0 || length > PMI_MESSAGE_MAX)
            return let_pass(f, (size_t)length, out);
    }
    if (f->held.len > PMI_LENGTH + PMI_MESSAGE_MAX)
        return let_pass(f, complete ? 0 : SIZE_MAX, out);
    return complete ? put_message(f, out) : 0;
}

/* Bytes at the beginning of data that pass unread. */
static size_t unread(struct pmi_filter *f, const uint8_t *data, size_t len)
{
    const uint8_t *end;
    if (f->mode == PMI_UNKNOWN)
        return len;
    if (f->pass == SIZE_MAX) {
        end = memchr(data, '\n', len);
        if (end == NULL)
            return len;
        f->pass = 0;
        return (size_t)(end - data) + 1;
    }
    if (len > f->pass)
        len = f->pass;
    f->pass -= len;
    return len;
}

int pmi_filter(struct pmi_filter *f, const uint8_t *data, size_t len, struct buf *out)
{
    int rc = 0;
    while (len > 0 && rc == 0) {
        bool complete;
        size_t part = unread(f, data, len);
        if (part > 0) {
            rc = buf_append(out, data, part);
        } else {
            part = want_more(f, data, len, &complete);
            rc = add_part(f, data, part, complete, out);
        }
        data += part;
        len -= part;
    }
    return rc;
}

int pmi_filter_end(struct pmi_filter *f, struct buf *out)
{
    int rc = buf_append(out, buf_head(&f->held), f->held.len);
    buf_free(&f->held);
    return rc;
}
