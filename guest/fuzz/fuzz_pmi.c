/* SPDX-License-Identifier: Apache-2.0 */
/* promise: pmi.exchange, attack.channel */
/*
 * Arbitrary bytes from a PMI server: what passes has the same length in one piece and in pieces,
 * and a mapping is written for any text. The first bytes choose tasks, guests and the size of
 * pieces.
 */
#include <stdlib.h>
#include <string.h>

#include "mapping.h"
#include "pmi_filter.h"
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
    return 0;
}
