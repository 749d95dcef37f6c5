/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What both fuzz targets share: an input is a byte stream of frames, cut into
 * pieces at which the program under test gets its turn.
 */
#ifndef FUZZ_RIG_H
#define FUZZ_RIG_H

#include <stddef.h>
#include <stdint.h>

#include "loop.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Write all of it to fd, letting the loop run in between; reads and forgets what comes back. */
void rig_feed(struct loop *loop, int fd, const uint8_t *data, size_t size);
/* Read and forget. */
void rig_drain(int fd);

#endif
