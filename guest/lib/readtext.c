/* SPDX-License-Identifier: Apache-2.0 */
#include "readtext.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

ssize_t read_text(const char *path, char *out, size_t size)
{
    size_t len = 0;
    ssize_t n = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    out[0] = '\0';
    if (fd < 0)
        return -errno;
    while (len < size - 1 && (n = read(fd, out + len, size - 1 - len)) > 0)
        len += (size_t)n;
    n = n < 0 ? -errno : (ssize_t)len;
    (void)close(fd);
    out[len] = '\0';
    return n;
}

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

bool text_is_number(const char *text, int base, uint64_t most, uint64_t *value)
{
    return isxdigit((unsigned char)*text) && text_number(&text, base, '\0', value) &&
           (*text == '\0' || *text == '\n') && *value <= most;
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
