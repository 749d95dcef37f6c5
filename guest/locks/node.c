/* SPDX-License-Identifier: Apache-2.0 */
#include "node.h"

#include <errno.h>
#include <unistd.h>

#include "file.h"

static int ask(struct locks_node *n, struct locks_request *r, struct locks_reply *reply)
{
    uint8_t out[LOCKS_REQUEST + LOCKS_TEXT_MAX];
    size_t len, have = 0;
    int used = 0;
    r->id = ++n->last;
    len = locks_pack_request(out, r);
    if (len == 0 || write_all(n->fd, out, len) < 0)
        return -EIO;
    while (used == 0) {
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
    if (rc < 0) {
        (void)close(n->fd);
        n->fd = -1;
    }
    return rc;
}
