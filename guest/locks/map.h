/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The modes of a file's bytes: ranges in ascending order, which do not overlap; other bytes are
 * free.
 */
#ifndef VHPC_LOCKS_MAP_H
#define VHPC_LOCKS_MAP_H

#include <stddef.h>
#include <stdint.h>

#include "wire.h"

struct locks_range {
    uint64_t start, end; /* first and last byte */
    uint8_t mode;        /* enum locks_mode */
};

struct locks_map {
    struct locks_range *range;
    size_t count, cap;
};

/* Set the mode of a range; 0 or -ENOMEM, in which case the map is as before. */
int locks_map_set(struct locks_map *m, struct locks_range r);
/*
 * Set the mode of the parts of the range with a weaker one; 0 or -ENOMEM, perhaps for a part of
 * them.
 */
int locks_map_raise(struct locks_map *m, struct locks_range r);
/* The longest range from byte `start` to at most `end` whose bytes have the same mode. */
struct locks_range locks_map_next(const struct locks_map *m, uint64_t start, uint64_t end);
/* Free the memory; the map is empty and usable again. */
void locks_map_free(struct locks_map *m);

#endif
