/* SPDX-License-Identifier: Apache-2.0 */
#include "multi_prog.h"

#include <ctype.h>
#include <string.h>

/* Checks one line; *entry becomes true if it starts programs. */
static bool reads_as_entry(const char *line, size_t length, bool *entry)
{
    size_t at = 0;
    size_t ranks;

    while (at < length && isspace((unsigned char)line[at]))
        at++;
    if (at == length || line[at] == '#')
        return true;
    ranks = at;
    while (at < length && strchr("0123456789,-*", line[at]) != NULL && line[at] != '\0')
        at++;
    if (at == ranks || at == length || !isspace((unsigned char)line[at]))
        return false;
    *entry = true;
    return true;
}

bool vhpc_argv_is_multi_prog(const char *text)
{
    bool entry = false;
    bool continued = false;

    while (*text != '\0') {
        size_t length = strcspn(text, "\n");

        if (!continued && !reads_as_entry(text, length, &entry))
            return false;
        continued = length > 0 && text[length - 1] == '\\';
        text += length + (text[length] == '\n');
    }
    return entry;
}
