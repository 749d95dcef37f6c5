/* SPDX-License-Identifier: Apache-2.0 */
/* promise: attack.channel */
/*
 * A hostile guest: arbitrary bytes from the virtio-serial port into the shim, with two clients, one
 * of them in the middle of a program, for whose output it shares memory with the shim.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "rig.h"
#include "shim.h"
#include "tlv.h"

static struct client *add_client(struct shim *s, int *peer)
{
    int pair[2];
    struct client *c = calloc(1, sizeof *c);
    if (c == NULL || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
        abort();
    /* As shim_accept() creates them, but without a socket in a file system. */
    client_adopt(s, c, pair[0], 0);
    *peer = pair[1];
    return c;
}

static void say_as_client(struct shim *s, int fd, uint8_t type, const struct buf *payload)
{
    uint8_t head[VHPC_HEADER];
    frame_pack(head, &(struct frame){.type = type, .length = (uint32_t)payload->len});
    if (write(fd, head, sizeof head) < 0 || write(fd, buf_head(payload), payload->len) < 0)
        abort();
    (void)loop_once(&s->loop, 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t fds[] = {0, 1, 1, 2, 2, 2};
    struct shim s = {.next_session = 1, .uid = 1000, .clients_max = VHPC_CLIENTS_MAX};
    struct buf hello = {0}, exec = {0};
    int guest[2], peer[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, guest) < 0)
        abort();
    if (shim_agent_open(&s, guest[1]) < 0)
        abort();
    for (int i = 0; i < 2; i++)
        (void)add_client(&s, &peer[i]);
    (void)tlv_put_u32(&hello, TAG_VERSION_MIN, 1);
    (void)tlv_put_u32(&hello, TAG_VERSION_MAX, 1);
    for (int i = 0; i < 2; i++)
        say_as_client(&s, peer[i], VHPC_HELLO, &hello);
    /* The guest's HELLO is already there, so that inputs start at the interesting part. */
    uint8_t head[VHPC_HEADER];
    frame_pack(head, &(struct frame){.type = VHPC_HELLO, .length = (uint32_t)hello.len});
    rig_feed(&s.loop, guest[0], head, sizeof head);
    rig_feed(&s.loop, guest[0], buf_head(&hello), hello.len);
    (void)tlv_put(&exec, TAG_FDS, fds, sizeof fds);
    (void)tlv_put_u32(&exec, TAG_UID, 0);
    say_as_client(&s, peer[0], VHPC_EXEC, &exec);
    say_as_client(&s, peer[0], VHPC_SHARE, &(struct buf){0});
    say_as_client(&s, peer[0], VHPC_SHARED, &(struct buf){0});
    say_as_client(&s, peer[1], VHPC_REQUEST, &exec);
    rig_feed(&s.loop, guest[0], data, size);
    shim_end(&s, SHIM_AGENT_CLOSED, NULL);
    for (int i = 0; i < 3; i++)
        (void)loop_once(&s.loop, 0);
    for (struct client *c = s.clients; c != NULL; c = c->next)
        chan_close(&c->chan);
    shim_limit_memory(&s);
    shim_sweep(&s);
    chan_release(&s.agent);
    loop_free(&s.loop);
    buf_free(&hello);
    buf_free(&exec);
    (void)close(guest[0]);
    for (int i = 0; i < 2; i++)
        (void)close(peer[i]);
    return 0;
}
