/* SPDX-License-Identifier: Apache-2.0 */
#include "pmixwatch.h"

#include <arpa/inet.h>
#include <string.h>

/* Numbers of commands, the same in PMIx 2 to 6. */
enum { COMMAND_PUBLISH = 6, COMMAND_SPAWN = 9 };

/* The header: who sends (4 bytes), a tag (4), the length of the content (4), padding (4). */
enum { LENGTH_AT = 8 };

/*
 * The bytes before the number of a command, which has one byte: the count of values (1), as an
 * int32 of two encodings. Libraries that were built for debugging also write the types, int32 (9)
 * and command (34).
 */
static const struct before {
    uint8_t bytes[8];
    size_t len;
} befores[] = {
    {{2}, 1},          /* PMIx 4 and later */
    {{0, 0, 0, 1}, 4}, /* PMIx 2 and 3 */
    {{9, 2, 34}, 3},   /* with types */
    {{0, 9, 0, 0, 0, 1, 0, 34}, 8},
};

/* The command of a request, or -1. */
static int command_of(const uint8_t *content, size_t len)
{
    for (size_t i = 0; i < sizeof befores / sizeof *befores; i++)
        if (len > befores[i].len && memcmp(content, befores[i].bytes, befores[i].len) == 0)
            return content[befores[i].len];
    return -1;
}

/* Whether the content has a text that ends with this one. */
static bool has(const uint8_t *content, size_t len, const char *text)
{
    return memmem(content, len, text, strlen(text) + 1) != NULL;
}

/* A message, or as much of it as the head holds. */
static enum pmixwatch_found take_message(const struct pmixwatch *w)
{
    const uint8_t *content = w->head + PMIXWATCH_HEADER;
    size_t len = w->have - PMIXWATCH_HEADER;
    switch (command_of(content, len)) {
    case COMMAND_SPAWN:
        return PMIXWATCH_SPAWN;
    case COMMAND_PUBLISH:
        if (has(content, len, ":accept"))
            return PMIXWATCH_ACCEPT;
        return has(content, len, ":connect") ? PMIXWATCH_CONNECT : PMIXWATCH_NOTHING;
    default:
        return PMIXWATCH_NOTHING;
    }
}

/* Length of the content. Only the first message has it in the byte order of the host. */
static uint32_t length_of(const struct pmixwatch *w)
{
    uint32_t length;
    memcpy(&length, w->head + LENGTH_AT, sizeof length);
    return w->greeted ? ntohl(length) : length;
}

/* The first message has no sender yet: eight bytes of the header are 0xff. */
static bool is_greeting(const struct pmixwatch *w)
{
    static const uint8_t nobody[] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    return memcmp(w->head, nobody, sizeof nobody) == 0;
}

/* All that is read of a message is in the head. */
static enum pmixwatch_found end_message(struct pmixwatch *w, uint32_t length)
{
    enum pmixwatch_found found = w->greeted ? take_message(w) : PMIXWATCH_NOTHING;
    w->greeted = true;
    w->skip = (uint64_t)length + PMIXWATCH_HEADER - w->have;
    w->have = 0;
    return found;
}

/* How many bytes the head gets at most, now. */
static size_t wanted(const struct pmixwatch *w)
{
    if (w->have < PMIXWATCH_HEADER)
        return PMIXWATCH_HEADER - w->have;
    uint32_t length = length_of(w);
    return PMIXWATCH_HEADER + (length < PMIXWATCH_CONTENT ? length : PMIXWATCH_CONTENT) - w->have;
}

/* Takes a part of the next message; how many bytes these are. */
static size_t read_part(struct pmixwatch *w, const uint8_t *data, size_t len,
                        enum pmixwatch_found *found)
{
    size_t want = wanted(w), part = len < want ? len : want;
    memcpy(w->head + w->have, data, part);
    w->have += part;
    if (w->have < PMIXWATCH_HEADER)
        return part;
    w->over = !w->greeted && !is_greeting(w);
    if (!w->over && wanted(w) == 0)
        *found = end_message(w, length_of(w));
    return part;
}

enum pmixwatch_found pmixwatch_read(struct pmixwatch *w, const uint8_t *data, size_t len)
{
    enum pmixwatch_found found = PMIXWATCH_NOTHING;
    while (len > 0 && !w->over && found == PMIXWATCH_NOTHING) {
        size_t part = w->skip < len ? (size_t)w->skip : len;
        if (part == 0)
            part = read_part(w, data, len, &found);
        else
            w->skip -= part;
        data += part;
        len -= part;
    }
    return found;
}
