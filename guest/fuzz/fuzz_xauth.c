/* SPDX-License-Identifier: Apache-2.0 */
/* promise: attack.relay */
/*
 * Arbitrary bytes as an authority file, and as lines of DISPLAY and of the kernel's table of
 * sockets: a cookie that is found is found again in the entry that the guest gets.
 */
#include <stdlib.h>
#include <string.h>

#include "rig.h"
#include "tcptable.h"
#include "xauth.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct x11_display display = {.number = 25}, again = {.number = 25};
    uint8_t entry[XAUTH_ENTRY_MAX];
    struct tcp_row row;
    if (xauth_find(data, size, "n1", &display) &&
        (!xauth_find(entry, xauth_entry(&display, entry), "guest", &again) ||
         memcmp(display.cookie, again.cookie, XAUTH_COOKIE) != 0))
        abort();
    char *line = malloc(size + 1);
    if (line == NULL)
        return 0;
    memcpy(line, data, size);
    line[size] = '\0';
    (void)xauth_display(line, &display.number);
    (void)tcptable_line(line, AF_INET6, &row);
    free(line);
    return 0;
}
