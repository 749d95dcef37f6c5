/* SPDX-License-Identifier: Apache-2.0 */
#include "frame.h"

#include <errno.h>
#include <stddef.h>

void frame_pack(uint8_t out[VHPC_HEADER], const struct frame *f)
{
    put_le32(out, f->length);
    out[4] = f->type;
    out[5] = f->fd;
    put_le16(out + 6, f->flags);
    put_le32(out + 8, f->session);
    put_le32(out + 12, f->call);
}

int frame_unpack(const uint8_t in[VHPC_HEADER], struct frame *f)
{
    *f = (struct frame){
        .length = get_le32(in),
        .type = in[4],
        .fd = in[5],
        .flags = get_le16(in + 6),
        .session = get_le32(in + 8),
        .call = get_le32(in + 12),
        .payload = NULL,
    };
    if (f->length > VHPC_PAYLOAD_MAX || f->type < VHPC_HELLO || f->type > VHPC_TYPE_LAST ||
        (f->flags & ~VHPC_FLAGS_ALL) != 0)
        return -EPROTO;
    return 0;
}
