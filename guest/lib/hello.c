/* SPDX-License-Identifier: Apache-2.0 */
#include "hello.h"

#include <errno.h>
#include <string.h>

#include "tlv.h"

void hello_init(struct hello *h)
{
    *h = (struct hello){.version_min = VHPC_PROTOCOL_MIN, .version_max = VHPC_PROTOCOL_MAX};
}

int hello_send(struct chan *c, const struct hello *h)
{
    struct buf b = {0};
    int rc = tlv_put_u32(&b, TAG_VERSION_MIN, h->version_min);
    if (rc == 0)
        rc = tlv_put_u32(&b, TAG_VERSION_MAX, h->version_max);
    if (rc == 0)
        rc = tlv_put_u32(&b, TAG_STATE, h->state);
    if (rc == 0 && h->shares != 0)
        rc = tlv_put_u32(&b, TAG_SHARES, h->shares);
    if (rc == 0 && h->agent_version[0] != '\0')
        rc = tlv_put_str(&b, TAG_AGENT_VERSION, h->agent_version);
    if (rc == 0 && h->boot_id[0] != '\0')
        rc = tlv_put_str(&b, TAG_BOOT_ID, h->boot_id);
    if (rc == 0 && h->kernel[0] != '\0')
        rc = tlv_put_str(&b, TAG_KERNEL, h->kernel);
    if (rc == 0)
        rc = chan_send_message(c, VHPC_HELLO, 0, 0, &b);
    buf_free(&b);
    return rc;
}

static int hello_field(const struct tlv *t, struct hello *h)
{
    switch (t->tag) {
    case TAG_VERSION_MIN:
        return tlv_u32(t, &h->version_min);
    case TAG_VERSION_MAX:
        return tlv_u32(t, &h->version_max);
    case TAG_STATE:
        return tlv_u32(t, &h->state);
    case TAG_SHARES:
        return tlv_u32(t, &h->shares);
    case TAG_AGENT_VERSION:
        return tlv_str_into(t, h->agent_version, sizeof h->agent_version);
    case TAG_BOOT_ID:
        return tlv_str_into(t, h->boot_id, sizeof h->boot_id);
    case TAG_KERNEL:
        return tlv_str_into(t, h->kernel, sizeof h->kernel);
    default:
        return 0;
    }
}

int hello_parse(const struct frame *f, struct hello *h)
{
    struct tlv_reader r = {f->payload, f->length};
    struct tlv t;
    int rc;
    if (f->flags != 0 || f->session != 0 || f->call != 0)
        return -EPROTO;
    *h = (struct hello){0};
    while ((rc = tlv_next(&r, &t)) > 0) {
        rc = hello_field(&t, h);
        if (rc < 0)
            return rc;
    }
    if (rc < 0 || h->version_min == 0 || h->version_max < h->version_min)
        return -EPROTO;
    return 0;
}

uint32_t hello_version(const struct hello *peer)
{
    uint32_t high = peer->version_max < VHPC_PROTOCOL_MAX ? peer->version_max : VHPC_PROTOCOL_MAX;
    uint32_t low = peer->version_min > VHPC_PROTOCOL_MIN ? peer->version_min : VHPC_PROTOCOL_MIN;
    return high >= low ? high : 0;
}

int error_send(struct chan *c, uint32_t session, uint32_t call, uint32_t kind, int number,
               const char *text)
{
    struct buf b = {0};
    int rc = tlv_put_u32(&b, TAG_KIND, kind);
    if (rc == 0)
        rc = tlv_put_u32(&b, TAG_ERRNO, (uint32_t)(number < 0 ? -number : number));
    if (rc == 0)
        rc = tlv_put(&b, TAG_TEXT, text, strnlen(text, sizeof((struct error_info *)0)->text - 1));
    if (rc == 0)
        rc = chan_send_message(c, VHPC_ERROR, session, call, &b);
    buf_free(&b);
    return rc;
}

int error_parse(const struct frame *f, struct error_info *e)
{
    struct tlv_reader r = {f->payload, f->length};
    struct tlv t;
    int rc;
    *e = (struct error_info){0};
    while ((rc = tlv_next(&r, &t)) > 0) {
        if (t.tag == TAG_KIND)
            rc = tlv_u32(&t, &e->kind);
        else if (t.tag == TAG_ERRNO)
            rc = tlv_u32(&t, &e->number);
        else if (t.tag == TAG_TEXT)
            rc = tlv_str_into(&t, e->text, sizeof e->text);
        if (rc < 0)
            return rc;
    }
    if (rc < 0)
        return rc;
    /* The text is shown on a terminal, and the sender may be a guest. */
    for (char *p = e->text; *p != '\0'; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = '?';
    return 0;
}
