/* SPDX-License-Identifier: Apache-2.0 */
#include "text.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

bool text_number(const char **at, int base, char end, uint64_t *value)
{
    char *rest;
    const char *begin = *at + strspn(*at, " \t");
    if (!isxdigit((unsigned char)*begin)) /* strtoull takes signs */
        return false;
    errno = 0;
    uint64_t number = strtoull(begin, &rest, base);
    if (errno != 0 || rest == begin || (end != '\0' && *rest != end))
        return false;
    *value = number;
    *at = end != '\0' ? rest + 1 : rest;
    return true;
}

bool text_word(const char **at, char *out, size_t size)
{
    const char *begin = *at + strspn(*at, " \t");
    size_t len = strcspn(begin, " \t\n");
    *at = begin + len;
    if (len == 0)
        return false;
    len = len < size ? len : size - 1;
    memcpy(out, begin, len);
    out[len] = '\0';
    return true;
}
