/* SPDX-License-Identifier: Apache-2.0 */
#include "pmimessage.h"

#include <stdlib.h>
#include <string.h>

long pmi_length(const void *six)
{
    char text[PMI_LENGTH + 1] = "";
    memcpy(text, six, PMI_LENGTH);
    size_t skip = strspn(text, " "), digits = strspn(text + skip, "0123456789");
    if (digits == 0 || text[skip + digits + strspn(text + skip + digits, " ")] != '\0')
        return -1;
    return strtol(text + skip, NULL, 10);
}

long pmi_first(const void *data, size_t len, bool fields, size_t most)
{
    long length;
    if (fields) {
        length = len < PMI_LENGTH ? 0 : pmi_length(data);
        if (length < 0 || (size_t)length > most)
            return -1;
        return len >= PMI_LENGTH && len - PMI_LENGTH >= (size_t)length ? length + PMI_LENGTH : 0;
    }
    const char *end = memchr(data, '\n', len);
    length = end != NULL ? end - (const char *)data + 1 : 0;
    return (size_t)length > most || (end == NULL && len > most) ? -1 : length;
}

bool pmi_has(const struct pmi_message *m, const char *field)
{
    size_t len = strlen(field), i = m->fields ? PMI_LENGTH : 0;
    const char *separators = m->fields ? ";" : " \n";
    while (i < m->len) {
        size_t end = i;
        while (end < m->len && strchr(separators, m->text[end]) == NULL)
            end++;
        if (end - i == len && memcmp(m->text + i, field, len) == 0)
            return true;
        i = end + 1;
    }
    return false;
}

bool pmi_begins_2(const struct pmi_message *m)
{
    return pmi_has(m, "pmi_version=2");
}

bool pmi_is(const struct pmi_message *m, const char *name)
{
    static const char cmd[] = "cmd=";
    size_t at = m->fields ? PMI_LENGTH : 0, len = strlen(name);
    size_t end = at + sizeof cmd - 1 + len;
    return m->len >= end && memcmp(m->text + at, cmd, sizeof cmd - 1) == 0 &&
           memcmp(m->text + at + sizeof cmd - 1, name, len) == 0 &&
           (m->len == end || strchr("; \n", m->text[end]) != NULL);
}
