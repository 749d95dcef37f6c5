/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared code of both fuzz targets: an input is a byte stream of frames, cut into pieces. After
 * each piece the program under test has a turn.
 */
#ifndef FUZZ_RIG_H
#define FUZZ_RIG_H

#include <stddef.h>
#include <stdint.h>

#include "loop.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Write all of it to fd and let the loop run in between; what comes back is discarded. */
void rig_feed(struct loop *loop, int fd, const uint8_t *data, size_t size);
/* Read and discard. */
void rig_drain(int fd);

#endif
