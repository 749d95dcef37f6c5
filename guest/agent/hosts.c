/* SPDX-License-Identifier: Apache-2.0 */
#include "hosts.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "file.h"

#define BEGIN "# guests of the cluster\n"
#define END "# end of the cluster\n"

enum { FILE_MAX = 16 << 20 };

int hosts_write(const char *path, struct buf *lines, const char *block)
{
    int rc = 0;
    if (block[0] != '\0') {
        rc = buf_append(lines, BEGIN, strlen(BEGIN));
        rc = rc < 0 ? rc : buf_append(lines, block, strlen(block));
        rc = rc < 0 ? rc : buf_append(lines, END, strlen(END));
    }
    return rc < 0 ? rc : replace_file(path, 0644, buf_head(lines), lines->len);
}

/* Append all lines of a text but those from BEGIN to END. */
static int copy_others(const char *text, struct buf *to)
{
    bool inside = false;
    int rc = 0;
    for (size_t len; rc == 0 && *text != '\0'; text += len) {
        const char *end = strchr(text, '\n');
        len = end != NULL ? (size_t)(end - text) + 1 : strlen(text);
        if (len == strlen(BEGIN) && memcmp(text, BEGIN, len) == 0)
            inside = true;
        else if (inside && len == strlen(END) && memcmp(text, END, len) == 0)
            inside = false;
        else if (!inside)
            rc = buf_append(to, text, len);
        if (rc == 0 && !inside && end == NULL)
            rc = buf_append(to, "\n", 1);
    }
    return rc;
}

int hosts_put_block(const char *path, const char *block)
{
    struct buf was = {0}, now = {0};
    int rc = read_file(path, FILE_MAX, &was);
    if (rc == -ENOENT)
        rc = 0;
    rc = rc < 0 ? rc : buf_append(&was, "", 1);
    rc = rc < 0 ? rc : copy_others((const char *)buf_head(&was), &now);
    rc = rc < 0 ? rc : hosts_write(path, &now, block);
    buf_free(&was);
    buf_free(&now);
    return rc;
}
