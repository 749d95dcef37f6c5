/* SPDX-License-Identifier: Apache-2.0 */
/* promise: attack.forward */
/* Any bytes from a host to `vhpc-agent --forward`: the memory for them stays bounded. */
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "forward.h"
#include "rig.h"

enum { PROGRAMS = 8, PIECE = 997 };

static int program[PROGRAMS];
static size_t programs;

/* Some connections are refused, some have a program that does not read, the others one that
 * writes. */
static int dial(const struct forward *f, unsigned try)
{
    int ends[2];
    if (try > 0)
        return -ENOENT;
    if (f->last % 5 == 0 || programs == PROGRAMS)
        return -ECONNREFUSED;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        abort();
    if (f->last % 2 == 0 && write(ends[1], "hello", 5) != 5)
        abort();
    program[programs++] = ends[1];
    return ends[0];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct forward f;
    f = (struct forward){.dial = dial};
    programs = 0;
    for (size_t at = 0, n; at < size && !f.ended; at += n) {
        n = size - at < PIECE ? size - at : PIECE;
        if (forward_feed(&f, data + at, n) < 0)
            break;
        if (f.loop.count > 0 && loop_once(&f.loop, 0) < 0)
            abort();
        if (f.in.len >= FORWARD_FRAME_MAX)
            abort();
        for (size_t i = 0; i < FORWARD_CHANNELS; i++)
            if (f.channel[i].in.len > FORWARD_WINDOW || f.channel[i].credit > FORWARD_WINDOW)
                abort();
        f.out.len = 0; /* the host reads all */
        f.out.head = 0;
    }
    forward_free(&f);
    for (size_t i = 0; i < programs; i++)
        (void)close(program[i]);
    return 0;
}
