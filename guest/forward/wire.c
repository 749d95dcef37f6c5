/* SPDX-License-Identifier: Apache-2.0 */
#include "wire.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "frame.h"

uint32_t forward_pack(uint8_t out[FORWARD_FRAME_MAX], const struct forward_frame *f)
{
    out[0] = f->type;
    out[1] = 0;
    put_le16(out + 2, f->length);
    put_le32(out + 4, f->channel);
    if (f->length > 0)
        memcpy(out + FORWARD_HEADER, f->payload, f->length);
    out[FORWARD_HEADER + f->length] = '\n';
    return FORWARD_HEADER + f->length + 1U;
}

static bool is_valid(const struct forward_frame *f)
{
    switch (f->type) {
    case FORWARD_HELLO:
        return f->length == 4 && f->channel == 0;
    case FORWARD_DATA:
        return f->length > 0 && f->length <= FORWARD_DATA_MAX && f->channel > 0;
    case FORWARD_CREDIT:
    case FORWARD_CLOSE:
        return f->length == 4 && f->channel > 0;
    case FORWARD_OPEN:
    case FORWARD_OPENED:
    case FORWARD_EOF:
        return f->length == 0 && f->channel > 0;
    default:
        return false;
    }
}

int forward_unpack(const uint8_t *in, uint32_t len, struct forward_frame *f)
{
    if (len < FORWARD_HEADER)
        return 0;
    *f = (struct forward_frame){
        .type = in[0], .length = get_le16(in + 2), .channel = get_le32(in + 4)};
    if (in[1] != 0 || !is_valid(f))
        return -EPROTO;
    if (len < FORWARD_HEADER + f->length + 1U)
        return 0;
    if (in[FORWARD_HEADER + f->length] != '\n')
        return -EPROTO;
    f->payload = in + FORWARD_HEADER;
    return FORWARD_HEADER + f->length + 1;
}
