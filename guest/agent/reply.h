/* SPDX-License-Identifier: Apache-2.0 */
/* REPLY: the answer to a REQUEST, at once or later. */
#ifndef VHPC_REPLY_H
#define VHPC_REPLY_H

#include <stdint.h>

#include "agent.h"

/*
 * Answer a request of a session. result is 0 or -errno, text one line that explains it ("" for
 * none), more holds further encoded fields. 0 or -errno.
 */
int reply_send(struct agent *a, uint32_t session, uint32_t request, int result, const char *text,
               const struct buf *more);

#endif
