/* SPDX-License-Identifier: Apache-2.0 */
/* Messages of a command: longer than a frame, made of fields, or repeated. */
#include <errno.h>

#include "exchange.h"

int exchange_send_tlv(struct exchange *x, uint8_t type, struct buf *payload)
{
    int rc = 0;
    struct frame f = {
        .type = type, .session = x->session, .call = x->call, .length = (uint32_t)payload->len};
    if (flow_check(&x->flow, x->side, &f) == FLOW_PASS)
        rc = chan_send_message(x->chan, type, x->session, x->call, payload);
    buf_free(payload);
    return rc;
}

int exchange_send_exec(struct exchange *x, const struct buf *message)
{
    const uint8_t *p = buf_head(message);
    size_t left = message->len;
    int rc = 0;
    if (left > VHPC_MESSAGE_MAX)
        return -EMSGSIZE;
    while (left > 0 && rc == 0) {
        size_t part = left < VHPC_PAYLOAD_MAX ? left : VHPC_PAYLOAD_MAX;
        left -= part;
        rc = exchange_send(x, VHPC_EXEC, 0, left > 0 ? VHPC_MORE : 0, p, part);
        p += part;
    }
    return rc;
}

void exchange_repeat_ends(struct exchange *x)
{
    for (int i = 0; i < VHPC_FDS_MAX; i++) {
        struct outlet *out = &x->outlet[i];
        if (x->flow.lane[i][x->side].open && !x->inlet[i].open)
            (void)exchange_send(x, VHPC_EOF, out->number, 0, NULL, 0);
        if (x->flow.lane[i][1 - x->side].open && (!out->open || out->eof))
            (void)exchange_send(x, VHPC_EOF, out->number, VHPC_READER, NULL, 0);
        out->owed = 0;
    }
}
