/* SPDX-License-Identifier: Apache-2.0 */
/* promise: pmi.exchange, attack.channel */
/*
 * Arbitrary bytes from a PMI server: what passes has the same length in one piece and in pieces,
 * and a mapping is written for any text; the same for what an agent keeps of a program's requests.
 * The first bytes choose tasks, guests and the size of pieces.
 */
#include <stdlib.h>
#include <string.h>

#include "mapping.h"
#include "pmi_filter.h"
#include "pmirecord.h"
#include "rig.h"

static void pass(const uint8_t *data, size_t size, size_t piece, struct pmi_filter f,
                 struct buf *out)
{
    for (size_t at = 0; at < size; at += piece)
        if (pmi_filter(&f, data + at, size - at < piece ? size - at : piece, out) < 0)
            abort();
    if (pmi_filter_end(&f, out) < 0)
        abort();
}

/* The bytes as requests, and as answers of a server that speaks PMI-2 or not. */
static void record(const uint8_t *data, size_t size, size_t piece, struct pmirecord *r)
{
    for (size_t at = 0; at < size; at += piece) {
        size_t part = size - at < piece ? size - at : piece;
        pmirecord_program(r, data + at, part);
        pmirecord_server(r, data + at, part);
        if (r->kept.len > PMIRECORD_MAX)
            abort();
    }
}

static void record_both(const uint8_t *data, size_t size, size_t piece)
{
    struct pmirecord whole = {0}, parts = {0};
    record(data, size, size + 1, &whole);
    record(data, size, piece, &parts);
    if (whole.lost == NULL && parts.lost == NULL &&
        (whole.kept.len != parts.kept.len || whole.program.count != parts.program.count))
        abort();
    pmirecord_free(&whole);
    pmirecord_free(&parts);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct buf whole = {0}, parts = {0};
    char mapping[MAPPING_TEXT_MAX + 1];
    if (size < 3)
        return 0;
    struct pmi_filter f = {.tasks = 1u + data[0], .guests = 1u + data[1] % 64};
    size_t piece = 1u + data[2];
    data += 3;
    size -= 3;
    pass(data, size, size + 1, f, &whole);
    pass(data, size, piece, f, &parts);
    if (whole.len != parts.len ||
        (whole.len > 0 && memcmp(buf_head(&whole), buf_head(&parts), whole.len) != 0))
        abort();
    if (mapping_divide((const char *)data, size, f.tasks, f.guests, mapping) < 0 ||
        strncmp(mapping, "(vector,(", 9) != 0)
        abort();
    buf_free(&whole);
    buf_free(&parts);
    record_both(data, size, piece);
    return 0;
}
