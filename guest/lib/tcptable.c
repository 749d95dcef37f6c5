/* SPDX-License-Identifier: Apache-2.0 */
#include "tcptable.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LISTEN = 10, WORD_DIGITS = 8, WORDS = 10 };

/* A number of at most `most` digits, with `end` after it. */
static bool read_number(const char *text, int base, size_t most, char end, uint64_t *number)
{
    const char *digits = base == 16 ? "0123456789ABCDEFabcdef" : "0123456789";
    size_t count = strspn(text, digits);
    *number = count > 0 && count <= most ? strtoull(text, NULL, base) : 0;
    return count > 0 && count <= most && text[count] == end;
}

/* ADDRESS:PORT; each word of an address is a number of this machine's byte order. */
static bool read_end(const char *text, size_t words, void *address, uint16_t *port)
{
    uint64_t value;
    const char *colon = strchr(text, ':');
    if (colon == NULL || (size_t)(colon - text) != words * WORD_DIGITS ||
        !read_number(colon + 1, 16, 4, '\0', &value))
        return false;
    *port = (uint16_t)value;
    for (size_t i = 0; i < words; i++) {
        char one[WORD_DIGITS + 1] = {0};
        memcpy(one, text + i * WORD_DIGITS, WORD_DIGITS);
        if (!read_number(one, 16, WORD_DIGITS, '\0', &value))
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
        !read_number(word[3], 16, 2, '\0', &state) || !read_number(word[7], 10, 10, '\0', &uid) ||
        !read_number(word[9], 10, 19, '\0', &row->inode))
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
