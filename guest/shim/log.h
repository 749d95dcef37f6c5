/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages on stderr, from the shim and from the processes whose stderr it reads, at a rate that a
 * guest or its user cannot raise.  The kernel limits the file itself (RLIMIT_FSIZE, set by the
 * process that starts the shim).
 */
#ifndef VHPC_SHIM_LOG_H
#define VHPC_SHIM_LOG_H

#include <stdbool.h>
#include <stddef.h>

#include "loop.h"

enum {
    LOG_BURST = 50,         /* lines at once */
    LOG_INTERVAL_MS = 1000, /* then one line per interval */
    LOG_LINE_MAX = 400,     /* bytes of a line; the rest is cut */
    LOG_TAG_MAX = 37,       /* bytes of a share's tag with its NUL: VIRTIO 1.2, section 5.11.4 */
};

/* Another process's stderr. */
struct log_pipe {
    struct source source;
    struct loop *loop;
    char tag[LOG_TAG_MAX];
    char line[LOG_LINE_MAX];
    size_t used;
    bool skip; /* the rest of a line that was too long */
};

/* Write a line, unless there were too many; a later line has the number of suppressed lines. */
__attribute__((format(printf, 1, 2))) void log_line(const char *format, ...);

/* Log what is written to the pipe TAG:FD. Returns 0, -EINVAL, or another -errno. */
int log_pipe_open(struct log_pipe *p, struct loop *loop, const char *spec);

/* Add bytes to the pipe's line and log the lines that are complete. Also for tests. */
void log_pipe_feed(struct log_pipe *p, const char *bytes, size_t length);

#endif
