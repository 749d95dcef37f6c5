/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files of X authority, as libXau reads and writes them: a sequence of entries, each a family and
 * four strings with their lengths in front. All numbers are u16, big endian.
 */
#ifndef VHPC_XAUTH_H
#define VHPC_XAUTH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    XAUTH_COOKIE = 16,        /* bytes of a MIT-MAGIC-COOKIE-1 */
    XAUTH_ENTRY_MAX = 64,     /* bytes of an entry that xauth_entry() writes */
    XAUTH_FILE_MAX = 1 << 20, /* bytes of a file that are read */
};

/* An X11 display that Slurm forwards, and what its clients need. */
struct x11_display {
    bool wanted;
    uint16_t number;
    uint8_t cookie[XAUTH_COOKIE];
};

/* "localhost:N" or "localhost:N.SCREEN", with N up to 65535: Slurm's value of DISPLAY. */
bool xauth_display(const char *text, uint16_t *number);
/*
 * The cookie of this display on this host, in the first entry that libXau would take. False without
 * such an entry, or if its cookie has another length.
 */
bool xauth_find(const uint8_t *data, size_t len, const char *host, struct x11_display *display);
/* The bytes of an entry that is valid for any name of the host; returns their number. */
size_t xauth_entry(const struct x11_display *display, uint8_t out[XAUTH_ENTRY_MAX]);

#endif
