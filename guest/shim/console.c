/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: The shim limits the console of its guest */
#include "console.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PAGE = 4096 }; /* holes consist of whole blocks */

static short want_changes(struct source *s)
{
    (void)s;
    return POLLIN;
}

/* Punch a hole if the file has grown too long; 0 or -errno. */
static int trim(struct console *c)
{
    struct stat st;
    if (fstat(c->fd, &st) < 0)
        return -errno;
    off_t from = c->punched > c->keep ? c->punched : c->keep;
    /*
     * Trim only after the file has grown by the length that is kept: otherwise each byte would cost
     * a hole.
     */
    if (st.st_size - from < 2 * c->keep)
        return 0;
    off_t to = (st.st_size - c->keep) & ~(off_t)(PAGE - 1);
    if (fallocate(c->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, to - from) == 0) {
        c->punched = to;
        return 0;
    }
    /* The file system has no holes: keep only the beginning. QEMU appends at the new end. */
    c->punched = 0;
    return ftruncate(c->fd, c->keep) < 0 ? -errno : 0;
}

static void changed(struct source *s, short revents)
{
    char events[4096];
    struct console *c = s->owner;
    (void)revents;
    if (read(s->fd, events, sizeof events) > 0)
        (void)trim(c);
}

int console_open(struct console *c, struct loop *loop, int fd, off_t keep)
{
    char path[64];
    c->fd = fd;
    c->keep = (keep + PAGE - 1) & ~(off_t)(PAGE - 1);
    c->source = (struct source){.want = want_changes, .ready = changed, .owner = c};
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
        return -errno;
    c->source.fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (c->source.fd < 0)
        return -errno;
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (inotify_add_watch(c->source.fd, path, IN_MODIFY) < 0)
        return -errno;
    int rc = loop_add(loop, &c->source);
    return rc == 0 ? trim(c) : rc;
}
