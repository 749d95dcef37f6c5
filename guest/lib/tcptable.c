/* SPDX-License-Identifier: Apache-2.0 */
#include "tcptable.h"

#include <stdio.h>
#include <string.h>

#include "readtext.h"

enum { LISTEN = 10, WORD_DIGITS = 8, WORDS = 10 };

/* ADDRESS:PORT; each word of an address is a number of this machine's byte order. */
static bool read_end(const char *text, size_t words, void *address, uint16_t *port)
{
    uint64_t value;
    const char *colon = strchr(text, ':');
    if (colon == NULL || (size_t)(colon - text) != words * WORD_DIGITS ||
        !text_is_number(colon + 1, 16, UINT16_MAX, &value))
        return false;
    *port = (uint16_t)value;
    for (size_t i = 0; i < words; i++) {
        char one[WORD_DIGITS + 1] = {0};
        memcpy(one, text + i * WORD_DIGITS, WORD_DIGITS);
        if (!text_is_number(one, 16, UINT32_MAX, &value))
            return false;
        memcpy((uint8_t *)address + i * sizeof(uint32_t), &(uint32_t){(uint32_t)value},
               sizeof(uint32_t));
    }
    return true;
}

bool tcptable_line(char *line, sa_family_t family, struct tcp_row *row)
{
    struct in6_addr remote;
    char *word[WORDS], *rest = NULL;
    size_t count = 0, words = family == AF_INET ? 1 : 4;
    uint64_t state, uid;
    *row = (struct tcp_row){.family = family};
    for (char *w = strtok_r(line, " \n", &rest); w != NULL && count < WORDS;
         w = strtok_r(NULL, " \n", &rest))
        word[count++] = w;
    if (count < WORDS || !read_end(word[1], words, &row->local, &row->local_port) ||
        !read_end(word[2], words, &remote, &row->remote_port) ||
        !text_is_number(word[3], 16, UINT8_MAX, &state) ||
        !text_is_number(word[7], 10, UINT32_MAX, &uid) ||
        !text_is_number(word[9], 10, UINT64_MAX, &row->inode))
        return false;
    row->listens = state == LISTEN;
    row->uid = (uint32_t)uid;
    return true;
}

static bool search(const char *path, sa_family_t family,
                   bool (*wanted)(const struct tcp_row *, const void *), const void *arg,
                   struct tcp_row *row)
{
    char line[512];
    bool found = false;
    FILE *f = fopen(path, "re");
    while (f != NULL && !found && fgets(line, sizeof line, f) != NULL)
        found = tcptable_line(line, family, row) && wanted(row, arg);
    if (f != NULL)
        (void)fclose(f);
    return found;
}

bool tcptable_find(bool (*wanted)(const struct tcp_row *, const void *arg), const void *arg,
                   struct tcp_row *row)
{
    return search("/proc/net/tcp", AF_INET, wanted, arg, row) ||
           search("/proc/net/tcp6", AF_INET6, wanted, arg, row);
}
