/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: The agent reads a program's PMI requests */
#include "pmiwatch.h"

#include <string.h>

#include "pmimessage.h"

static const char init[] = "cmd=init";

static bool begins(const struct pmiwatch *w, const char *text)
{
    size_t len = strlen(text);
    return w->have >= len && memcmp(w->head, text, len) == 0;
}

/* A line, or as much of it as the head holds. */
static enum pmiwatch_found take_line(struct pmiwatch *w)
{
    bool second = begins(w, init) && w->begun;
    if (begins(w, init)) {
        const struct pmi_message m = {.text = w->head, .len = w->have};
        w->begun = true;
        w->messages = pmi_begins_2(&m);
    }
    if (second)
        return PMIWATCH_SECOND_INIT;
    return begins(w, "mcmd=spawn") ? PMIWATCH_SPAWN : PMIWATCH_NOTHING;
}

/* One more byte of a line is in the head. */
static enum pmiwatch_found read_line(struct pmiwatch *w)
{
    enum pmiwatch_found found;
    bool end = w->head[w->have - 1] == '\n';
    if (!end && w->have < PMIWATCH_HEAD)
        return PMIWATCH_NOTHING;
    found = take_line(w);
    w->skip_line = !end;
    w->have = 0;
    return found;
}

/* One more byte of a message is in the head. */
static enum pmiwatch_found read_message(struct pmiwatch *w)
{
    enum pmiwatch_found found = PMIWATCH_NOTHING;
    if (w->have < PMI_LENGTH)
        return found;
    long length = pmi_length(w->head);
    if (length < 0) {
        /* The next program begins with a line again. */
        w->messages = false;
        w->over = memcmp(w->head, init, PMI_LENGTH) != 0;
        return found;
    }
    size_t told =
        (size_t)length < PMIWATCH_HEAD - PMI_LENGTH ? PMI_LENGTH + (size_t)length : PMIWATCH_HEAD;
    if (w->have < told)
        return found;
    if (memmem(w->head, w->have, "cmd=spawn;", sizeof "cmd=spawn;" - 1) == w->head + PMI_LENGTH)
        found = PMIWATCH_SPAWN;
    w->skip = (uint64_t)length + PMI_LENGTH - w->have;
    w->have = 0;
    return found;
}

/* Pass over what is known to be the rest of a line or message; how many bytes these are. */
static size_t skip(struct pmiwatch *w, const uint8_t *data, size_t len)
{
    size_t part = len;
    if (w->over)
        return len;
    if (w->skip_line) {
        const uint8_t *end = memchr(data, '\n', len);
        w->skip_line = end == NULL;
        return end == NULL ? len : (size_t)(end - data) + 1;
    }
    if (part > w->skip)
        part = (size_t)w->skip;
    w->skip -= part;
    return part;
}

enum pmiwatch_found pmiwatch_read(struct pmiwatch *w, const uint8_t *data, size_t len)
{
    enum pmiwatch_found found = PMIWATCH_NOTHING;
    while (len > 0 && found == PMIWATCH_NOTHING) {
        size_t part = skip(w, data, len);
        if (part == 0) {
            w->head[w->have++] = (char)*data;
            part = 1;
            found = w->messages ? read_message(w) : read_line(w);
        }
        data += part;
        len -= part;
    }
    return found;
}
