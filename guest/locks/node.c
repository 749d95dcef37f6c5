/* SPDX-License-Identifier: Apache-2.0 */
#include "node.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "file.h"

/* Wait until the port can be read or written; -EIO: the host has closed it, or an interrupt. */
static int wait_for(const struct locks_node *n, short events)
{
    struct pollfd p[2] = {{.fd = n->fd, .events = events},
                          {.fd = n->interrupt > 0 ? n->interrupt : -1, .events = POLLIN}};
    int rc;
    do
        rc = poll(p, 2, -1);
    while (rc < 0 && errno == EINTR);
    return rc > 0 && p[1].revents == 0 && (p[0].revents & events) != 0 ? 0 : -EIO;
}

static int ask(struct locks_node *n, struct locks_request *r, struct locks_reply *reply)
{
    uint8_t out[LOCKS_REQUEST + LOCKS_TEXT_MAX];
    size_t len, have = 0;
    int used = 0;
    r->id = ++n->last;
    len = locks_pack_request(out, r);
    /* A port without a host blocks who writes. */
    if (len == 0 || wait_for(n, POLLOUT) < 0 || write_all(n->fd, out, len) < 0)
        return -EIO;
    while (used == 0) {
        if (wait_for(n, POLLIN) < 0)
            return -EIO;
        ssize_t got = read(n->fd, n->in + have, sizeof n->in - 1 - have);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return -EIO;
        have += (size_t)got;
        n->in[have] = '\0';
        used = locks_unpack_reply(n->in, have, reply);
    }
    return used == (int)have && reply->id == r->id ? 0 : -EIO;
}

int node_ask(struct locks_node *n, struct locks_request *r, struct locks_reply *reply)
{
    if (n->fd < 0)
        return -EIO;
    int rc = ask(n, r, reply);
    if (rc < 0)
        node_close(n);
    return rc;
}

void node_close(struct locks_node *n)
{
    if (n->fd >= 0)
        (void)close(n->fd);
    n->fd = -1;
}

int node_open(struct locks_node *n, const char *path)
{
    n->fd = open(path, O_RDWR | O_CLOEXEC);
    if (n->fd < 0)
        return -errno;
    struct pollfd p = {.fd = n->fd, .events = POLLOUT};
    if (poll(&p, 1, 0) > 0 && (p.revents & (POLLHUP | POLLERR)) == 0)
        return 0;
    node_close(n);
    return -ENOTCONN;
}
