/* SPDX-License-Identifier: Apache-2.0 */
#include "map.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Place of the first range that ends at byte `at` or behind it. */
static size_t place(const struct locks_map *m, uint64_t at)
{
    size_t low = 0, high = m->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (m->range[middle].end < at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* A change adds at most two ranges: one is cut in two, and the new one is between them. */
static int reserve(struct locks_map *m)
{
    if (m->cap - m->count >= 2)
        return 0;
    size_t cap = m->cap == 0 ? 8 : m->cap * 2;
    struct locks_range *range = reallocarray(m->range, cap, sizeof *range);
    if (range == NULL)
        return -ENOMEM;
    m->range = range;
    m->cap = cap;
    return 0;
}

int locks_map_set(struct locks_map *m, struct locks_range r)
{
    struct locks_range new[3];
    size_t add = 0;
    if (reserve(m) < 0)
        return -ENOMEM;
    /* Neighbours with the same mode become one range with it. */
    size_t first = place(m, r.start == 0 ? 0 : r.start - 1), past = first;
    for (; past < m->count && (m->range[past].start <= r.end || m->range[past].start - 1 == r.end);
         past++) {
        struct locks_range old = m->range[past];
        if (old.mode == r.mode) {
            r.start = old.start < r.start ? old.start : r.start;
            r.end = old.end > r.end ? old.end : r.end;
        }
    }
    if (past > first && m->range[first].start < r.start) {
        new[add] = m->range[first];
        new[add].end = new[add].end < r.start ? new[add].end : r.start - 1;
        add++;
    }
    if (r.mode != LOCKS_FREE)
        new[add++] = r;
    if (past > first && m->range[past - 1].end > r.end) {
        new[add] = m->range[past - 1];
        new[add].start = new[add].start > r.end ? new[add].start : r.end + 1;
        add++;
    }
    memmove(m->range + first + add, m->range + past, (m->count - past) * sizeof *m->range);
    memcpy(m->range + first, new, add * sizeof *m->range);
    m->count = m->count - (past - first) + add;
    return 0;
}

int locks_map_raise(struct locks_map *m, struct locks_range r)
{
    for (uint64_t at = r.start;;) {
        struct locks_range part = locks_map_next(m, at, r.end);
        if (part.mode < r.mode &&
            locks_map_set(m, (struct locks_range){part.start, part.end, r.mode}) < 0)
            return -ENOMEM;
        if (part.end == r.end)
            return 0;
        at = part.end + 1;
    }
}

struct locks_range locks_map_next(const struct locks_map *m, uint64_t start, uint64_t end)
{
    size_t at = place(m, start);
    if (at == m->count || m->range[at].start > end)
        return (struct locks_range){start, end, LOCKS_FREE};
    struct locks_range found = m->range[at];
    if (found.start > start)
        return (struct locks_range){start, found.start - 1, LOCKS_FREE};
    return (struct locks_range){start, found.end < end ? found.end : end, found.mode};
}

void locks_map_free(struct locks_map *m)
{
    free(m->range);
    *m = (struct locks_map){0};
}
