/* SPDX-License-Identifier: Apache-2.0 */
#include "reply.h"

#include <time.h>

#include "tlv.h"

static uint64_t uptime_ms(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

int reply_send(struct agent *a, uint32_t session, uint32_t request, int result, const char *text,
               const struct buf *more)
{
    struct buf b = {0};
    int rc = tlv_put_u32(&b, TAG_REQUEST_ID, request);
    rc = rc < 0 ? rc : tlv_put_u32(&b, TAG_ERRNO, (uint32_t)-result);
    rc = rc < 0 ? rc : tlv_put_u64(&b, TAG_UPTIME_MS, uptime_ms());
    if (rc == 0 && text[0] != '\0')
        rc = tlv_put_str(&b, TAG_TEXT, text);
    if (rc == 0 && more->len > 0)
        rc = buf_append(&b, buf_head(more), more->len);
    if (rc == 0)
        rc = chan_send_message(&a->host, VHPC_REPLY, session, 0, &b);
    buf_free(&b);
    return rc;
}
