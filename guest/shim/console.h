/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keeps the file of a guest's serial console from growing without end.
 *
 * QEMU appends what the guest writes, and the guest's root is the user: he could
 * fill the node's disk. So the middle of a long console is punched out of the
 * file. Its beginning (the boot) and its end (the death) are what is read later,
 * the end stays where QEMU appends, and no byte of it can get lost on the way.
 */
#ifndef VHPC_CONSOLE_H
#define VHPC_CONSOLE_H

#include <sys/types.h>

#include "loop.h"

struct console {
    struct source source; /* inotify: a silent console costs nothing */
    int fd;
    off_t keep;    /* bytes kept at the beginning, and at least as many at the end */
    off_t punched; /* where the hole ends */
};

/* Watch the file behind fd, open for reading and writing; 0 or -errno. */
int console_open(struct console *c, struct loop *loop, int fd, off_t keep);
/* Make the file small again if it has grown too long; 0 or -errno. */
int console_trim(struct console *c);

#endif
