/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Limits the size of the file with a guest's serial console.
 *
 * QEMU appends what the guest writes, and the job's user, who is root in the guest, could fill the
 * node's disk. Therefore holes are punched into the middle of a long console file. The beginning
 * (the boot) and the end (the cause of a crash) are kept for later; the end stays where QEMU
 * appends, and no byte of it is lost in between.
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

#endif
