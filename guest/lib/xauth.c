/* SPDX-License-Identifier: Apache-2.0 */
#include "xauth.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* X11/Xauth.h */
enum { FAMILY_LOCAL = 256, FAMILY_WILD = 65535 };

static const char cookies[] = "MIT-MAGIC-COOKIE-1";

struct bytes {
    const uint8_t *p;
    size_t len;
};

struct entry {
    size_t family;
    struct bytes address, number, name, data;
};

bool xauth_display(const char *text, uint16_t *number)
{
    static const char host[] = "localhost:";
    if (strncmp(text, host, sizeof host - 1) != 0)
        return false;
    text += sizeof host - 1;
    size_t digits = strspn(text, "0123456789");
    unsigned long value = digits > 0 && digits < 6 ? strtoul(text, NULL, 10) : UINT16_MAX + 1UL;
    const char *rest = text + digits;
    if (*rest == '.' && rest[1] != '\0')
        rest += 1 + strspn(rest + 1, "0123456789");
    *number = (uint16_t)value;
    return *rest == '\0' && value <= UINT16_MAX;
}

static bool take_number(struct bytes *from, size_t *number)
{
    if (from->len < 2)
        return false;
    *number = (size_t)from->p[0] << 8 | from->p[1];
    from->p += 2;
    from->len -= 2;
    return true;
}

static bool take_bytes(struct bytes *from, struct bytes *out)
{
    if (!take_number(from, &out->len) || from->len < out->len)
        return false;
    out->p = from->p;
    from->p += out->len;
    from->len -= out->len;
    return true;
}

static bool take_entry(struct bytes *from, struct entry *e)
{
    return take_number(from, &e->family) && take_bytes(from, &e->address) &&
           take_bytes(from, &e->number) && take_bytes(from, &e->name) && take_bytes(from, &e->data);
}

static bool is(const struct bytes *b, const char *text)
{
    return b->len == strlen(text) && memcmp(b->p, text, b->len) == 0;
}

bool xauth_find(const uint8_t *data, size_t len, const char *host, struct x11_display *display)
{
    struct bytes left = {data, len};
    struct entry e;
    char number[8];
    (void)snprintf(number, sizeof number, "%u", display->number);
    while (take_entry(&left, &e)) {
        if (e.family != FAMILY_WILD && !(e.family == FAMILY_LOCAL && is(&e.address, host)))
            continue;
        if ((e.number.len > 0 && !is(&e.number, number)) || !is(&e.name, cookies))
            continue;
        if (e.data.len != XAUTH_COOKIE)
            return false;
        memcpy(display->cookie, e.data.p, XAUTH_COOKIE);
        return true;
    }
    return false;
}

static uint8_t *put_number(uint8_t *at, size_t number)
{
    *at++ = (uint8_t)(number >> 8);
    *at++ = (uint8_t)number;
    return at;
}

static uint8_t *put_bytes(uint8_t *at, const void *data, size_t len)
{
    at = put_number(at, len);
    memcpy(at, data, len);
    return at + len;
}

size_t xauth_entry(const struct x11_display *display, uint8_t out[XAUTH_ENTRY_MAX])
{
    char number[8];
    int digits = snprintf(number, sizeof number, "%u", display->number);
    uint8_t *at = put_number(out, FAMILY_WILD);
    at = put_bytes(at, "", 0);
    at = put_bytes(at, number, (size_t)digits);
    at = put_bytes(at, cookies, sizeof cookies - 1);
    at = put_bytes(at, display->cookie, XAUTH_COOKIE);
    return (size_t)(at - out);
}
