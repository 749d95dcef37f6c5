/* SPDX-License-Identifier: Apache-2.0 */
#include "pmixmessage.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>

enum { TAG_AT = 4, LENGTH_AT = 8, NOBODY = 8, ENCODED_MAX = 9 };

/* A command has one byte, after the count of values, 1. */
enum { COMMAND_AT = PMIX_HEADER + PMIX_COMMAND - 1, ONE = 2 };

/* The type of a buffer whose values have no types before them. */
enum { WITHOUT_TYPES = 1 };

static uint32_t word_at(const uint8_t *data)
{
    uint32_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

/* The greeting has no sender yet. It alone has its length in the byte order of the host. */
bool pmix_is_greeting(const uint8_t *data, size_t len)
{
    static const uint8_t nobody[NOBODY] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    return memcmp(data, nobody, len < NOBODY ? len : NOBODY) == 0;
}

long pmix_first(const uint8_t *data, size_t len, bool greeting)
{
    if (len < PMIX_HEADER)
        return 0;
    uint32_t content = word_at(data + LENGTH_AT);
    content = greeting ? content : ntohl(content);
    if (content > PMIX_CONTENT_MAX)
        return -1;
    return len - PMIX_HEADER < content ? 0 : (long)content + PMIX_HEADER;
}

uint32_t pmix_tag(const uint8_t *message)
{
    return ntohl(word_at(message + TAG_AT));
}

enum pmix_command pmix_command(const uint8_t *message, size_t len)
{
    bool is_one = len > COMMAND_AT && message[PMIX_HEADER] == ONE;
    return is_one ? (enum pmix_command)message[COMMAND_AT] : PMIX_NO_COMMAND;
}

bool pmix_is_good(const uint8_t *answer, size_t len)
{
    return len > COMMAND_AT && answer[PMIX_HEADER] == ONE && answer[COMMAND_AT] == 0;
}

/* --- reading ------------------------------------------------------------------------------ */

struct reader {
    const uint8_t *at, *end;
};

/* A text with a zero at its end, or NULL. */
static const char *read_text(struct reader *r)
{
    const uint8_t *zero = memchr(r->at, '\0', (size_t)(r->end - r->at));
    const char *text = (const char *)r->at;
    if (zero == NULL)
        return NULL;
    r->at = zero + 1;
    return text;
}

static bool skip(struct reader *r, uint64_t len)
{
    if (len > (uint64_t)(r->end - r->at))
        return false;
    r->at += len;
    return true;
}

/* The texts of a greeting. */
struct greeting {
    const char *security, *nspace, *version, *encoding, *store;
    uint8_t type;
};

/* A greeting: security, credential, kind of process, namespace, rank, version, encoding, store. */
static bool read_greeting(const uint8_t *message, size_t len, struct greeting *g)
{
    struct reader r = {message + PMIX_HEADER, message + len};
    uint32_t credential;
    g->security = read_text(&r);
    if (g->security == NULL || r.end - r.at < (long)sizeof credential)
        return false;
    credential = ntohl(word_at(r.at));
    /* Kind 0 is a program that the server's host has started; others are tools. */
    if (!skip(&r, (uint64_t)credential + sizeof credential) || r.at == r.end || *r.at++ != 0)
        return false;
    g->nspace = read_text(&r);
    if (g->nspace == NULL || !skip(&r, sizeof(uint32_t)))
        return false;
    g->version = read_text(&r);
    g->encoding = g->version != NULL ? read_text(&r) : NULL;
    if (g->encoding == NULL || r.at == r.end)
        return false;
    g->type = *r.at++;
    g->store = read_text(&r);
    return g->store != NULL;
}

bool pmix_knows(const uint8_t *greeting, size_t len)
{
    struct greeting g = {0};
    return len > PMIX_HEADER && read_greeting(greeting, len, &g) &&
           strcmp(g.security, "native") == 0 &&
           (strcmp(g.encoding, "v4") == 0 || strcmp(g.encoding, "v41") == 0) &&
           g.type == WITHOUT_TYPES && strcmp(g.store, "hash") == 0;
}

/* An integer without a sign. */
static bool read_number(struct reader *r, uint64_t *value)
{
    *value = 0;
    for (unsigned shift = 0; shift < 56 && r->at < r->end; shift += 7) {
        uint8_t byte = *r->at++;
        *value |= (uint64_t)(byte & 0x7f) << shift;
        if ((byte & 0x80) == 0)
            return true;
    }
    return false;
}

/* --- writing -------------------------------------------------------------------------------- */

static int put_number(struct buf *out, uint64_t value)
{
    uint8_t raw[ENCODED_MAX];
    size_t len = 0;
    do {
        raw[len] = (uint8_t)(value & 0x7f);
        value >>= 7;
        raw[len++] |= value > 0 ? 0x80 : 0;
    } while (value > 0 && len < sizeof raw);
    return buf_append(out, raw, len);
}

/* The bytes of `out` from here on are a message. */
static void put_length(struct buf *out, size_t from, bool greeting)
{
    uint32_t length = (uint32_t)(out->len - from - PMIX_HEADER);
    length = greeting ? length : htonl(length);
    memcpy(out->data + out->head + from + LENGTH_AT, &length, sizeof length);
}

int pmix_put(struct buf *out, uint32_t tag, enum pmix_command command)
{
    uint8_t message[COMMAND_AT + 1] = {0};
    uint32_t length = htonl(sizeof message - PMIX_HEADER);
    tag = htonl(tag);
    memcpy(message + TAG_AT, &tag, sizeof tag);
    memcpy(message + LENGTH_AT, &length, sizeof length);
    message[PMIX_HEADER] = ONE;
    message[COMMAND_AT] = (uint8_t)command;
    return buf_append(out, message, sizeof message);
}

/* --- the namespace ---------------------------------------------------------------------------- */

/* As a text of a content: its length with the zero, doubled, because it has a sign. */
static size_t encode(const char *nspace, uint8_t text[PMIX_NAMESPACE_MAX + 2])
{
    size_t len = strnlen(nspace, PMIX_NAMESPACE_MAX);
    text[0] = (uint8_t)(2 * (len + 1));
    memcpy(text + 1, nspace, len);
    text[len + 1] = '\0';
    return len + 2;
}

static int rename_all(struct reader r, const char *own, const char *other, struct buf *out)
{
    uint8_t before[PMIX_NAMESPACE_MAX + 2], after[PMIX_NAMESPACE_MAX + 2];
    size_t before_len = encode(own, before), after_len = encode(other, after);
    const uint8_t *found;
    int rc = 0;
    while (rc == 0 && (found = memmem(r.at, (size_t)(r.end - r.at), before, before_len)) != NULL) {
        rc = buf_append(out, r.at, (size_t)(found - r.at));
        rc = rc < 0 ? rc : buf_append(out, after, after_len);
        r.at = found + before_len;
    }
    return rc < 0 ? rc : buf_append(out, r.at, (size_t)(r.end - r.at));
}

/* A count of values, which is 1. */
static bool read_one(struct reader *r)
{
    uint64_t count;
    return read_number(r, &count) && count == ONE;
}

/* One status, and any number of times one object. 1: it is something else; 0 or -ENOMEM. */
static int rename_objects(struct reader r, const char *own, const char *other, struct buf *out)
{
    const uint8_t *begin = r.at;
    struct buf part = {0};
    uint64_t number;
    if (!read_one(&r) || !read_number(&r, &number))
        return 1;
    int rc = buf_append(out, begin, (size_t)(r.at - begin));
    while (rc == 0 && r.at < r.end) {
        if (!read_one(&r) || !read_number(&r, &number) || number > (uint64_t)(r.end - r.at)) {
            rc = 1;
            break;
        }
        struct reader object = {r.at, r.at + number};
        r.at = object.end;
        part.len = 0;
        rc = rename_all(object, own, other, &part);
        rc = rc < 0 ? rc : put_number(out, ONE);
        rc = rc < 0 ? rc : put_number(out, part.len);
        rc = rc < 0 ? rc : buf_append(out, buf_head(&part), part.len);
    }
    buf_free(&part);
    return rc;
}

static int rename_greeting(const uint8_t *message, size_t len, const char *own, const char *other,
                           struct buf *out)
{
    struct greeting g = {0};
    const uint8_t *end = message + len, *begin = message + PMIX_HEADER;
    if (!read_greeting(message, len, &g) || strcmp(g.nspace, own) != 0)
        return buf_append(out, begin, (size_t)(end - begin));
    const uint8_t *nspace = (const uint8_t *)g.nspace, *rest = nspace + strlen(own);
    int rc = buf_append(out, begin, (size_t)(nspace - begin));
    rc = rc < 0 ? rc : buf_append(out, other, strnlen(other, PMIX_NAMESPACE_MAX));
    return rc < 0 ? rc : buf_append(out, rest, (size_t)(end - rest));
}

int pmix_rename(const uint8_t *message, size_t len, enum pmix_place place, const char *own,
                const char *other, struct buf *out)
{
    struct reader content = {message + PMIX_HEADER, message + len};
    size_t from = out->len;
    int rc = buf_append(out, message, PMIX_HEADER);
    if (rc == 0 && place == PMIX_IN_GREETING) {
        rc = rename_greeting(message, len, own, other, out);
    } else if (rc == 0 && place == PMIX_IN_OBJECTS) {
        rc = rename_objects(content, own, other, out);
        if (rc == 1)
            out->len = from + PMIX_HEADER;
        rc = rc == 1 ? rename_all(content, own, other, out) : rc;
    } else if (rc == 0) {
        rc = rename_all(content, own, other, out);
    }
    if (rc == 0)
        put_length(out, from, place == PMIX_IN_GREETING);
    return rc;
}
