/* SPDX-License-Identifier: Apache-2.0 */
#include "text.h"

#include <string.h>

/*
 * Length in bytes of the plain character at text, 0 if it is not plain. Table 3-7 of the Unicode
 * Standard: overlong forms, surrogates and code points above U+10FFFF are not well-formed.
 */
static size_t plain_length(const unsigned char *text, size_t room)
{
    uint32_t point;
    size_t length;

    if (text[0] < 0x80)
        return text[0] >= 0x20 && text[0] != 0x7f;
    if (text[0] >= 0xc2 && text[0] <= 0xdf)
        length = 2;
    else if (text[0] >= 0xe0 && text[0] <= 0xef)
        length = 3;
    else if (text[0] >= 0xf0 && text[0] <= 0xf4)
        length = 4;
    else
        return 0;
    if (length > room)
        return 0;
    point = text[0] & (0xffU >> (length + 1));
    for (size_t i = 1; i < length; i++) {
        if ((text[i] & 0xc0) != 0x80)
            return 0;
        point = point << 6 | (text[i] & 0x3fU);
    }
    if ((length == 3 && point < 0x800) || (length == 4 && point < 0x10000) || point > 0x10ffff)
        return 0;
    if (point < 0xa0 || point == 0x2028 || point == 0x2029)
        return 0;
    if (point >= 0xd800 && point <= 0xdfff)
        return 0;
    return length;
}

bool vhpc_text_is_plain(const char *text, size_t length)
{
    size_t at = 0;

    while (at < length) {
        size_t step = plain_length((const unsigned char *)text + at, length - at);
        if (step == 0)
            return false;
        at += step;
    }
    return true;
}

const char *vhpc_text_shown(const char *text, char *out, size_t size)
{
    size_t length = strlen(text);
    size_t used = 0;

    for (size_t at = 0; at < length;) {
        size_t step = plain_length((const unsigned char *)text + at, length - at);
        size_t bytes = step == 0 ? 1 : step;
        bool last = at + bytes == length;

        /* Keep three bytes for "..." unless this character ends the text. */
        if (used + bytes + (last ? 1 : 4) > size) {
            memcpy(out + used, "...", 3);
            used += 3;
            break;
        }
        if (step == 0)
            out[used] = '?';
        else
            memcpy(out + used, text + at, step);
        used += bytes;
        at += bytes;
    }
    out[used] = '\0';
    return out;
}

bool vhpc_text_number(const char *text, size_t length, uint64_t max, uint64_t *number)
{
    uint64_t value = 0;

    if (length == 0)
        return false;
    for (size_t i = 0; i < length; i++) {
        unsigned digit = (unsigned char)text[i] - (unsigned)'0';
        if (digit > 9 || digit > max || value > (max - digit) / 10)
            return false;
        value = value * 10 + digit;
    }
    *number = value;
    return true;
}
