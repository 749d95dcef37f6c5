/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A shim in this process: its real code on real sockets; the test controls the ends of the guest
 * and of the clients. SO_PEERCRED of clients is our own uid.
 */
#ifndef RIG_SHIM_H
#define RIG_SHIM_H

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "check.h"
#include "shim.h"
#include "tlv.h"

struct rig {
    struct shim shim;
    int guest; /* the agent's end */
    char dir[64];
    char path[96];
};

struct peer_frame {
    struct frame head;
    uint8_t payload[VHPC_PAYLOAD_MAX];
};

static inline void rig_accept(struct source *s, short revents)
{
    (void)revents;
    shim_accept(s->owner, s->fd);
}

static inline short rig_want(struct source *s)
{
    (void)s;
    return POLLIN;
}

static inline void rig_open(struct rig *r, uid_t job_uid)
{
    int pair[2];
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    memset(r, 0, sizeof *r);
    (void)snprintf(r->dir, sizeof r->dir, "/tmp/vhpc-test-XXXXXX");
    assert_non_null(mkdtemp(r->dir));
    (void)snprintf(r->path, sizeof r->path, "%s/run.sock", r->dir);
    (void)snprintf(at.sun_path, sizeof at.sun_path, "%s", r->path);
    r->shim.uid = job_uid;
    r->shim.next_session = 1;
    r->shim.clients_max = VHPC_CLIENTS_MAX;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    r->guest = pair[0];
    (void)fcntl(r->guest, F_SETFL, O_NONBLOCK);
    r->shim.listener = (struct source){.want = rig_want, .ready = rig_accept, .owner = &r->shim};
    r->shim.listener.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_int_equal(bind(r->shim.listener.fd, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(r->shim.listener.fd, 8), 0);
    assert_int_equal(loop_add(&r->shim.loop, &r->shim.listener), 0);
    assert_int_equal(shim_agent_open(&r->shim, pair[1]), 0);
}

static inline void rig_turn(struct rig *r)
{
    for (int i = 0; i < 20; i++) {
        assert_int_equal(loop_once(&r->shim.loop, 0), 0);
        shim_limit_memory(&r->shim);
        shim_sweep(&r->shim);
    }
}

static inline void rig_close(struct rig *r)
{
    shim_end(&r->shim, SHIM_AGENT_CLOSED, NULL);
    rig_turn(r);
    for (struct client *c = r->shim.clients; c != NULL; c = c->next)
        chan_close(&c->chan);
    shim_limit_memory(&r->shim);
    shim_sweep(&r->shim);
    chan_release(&r->shim.agent);
    (void)close(r->shim.listener.fd);
    loop_free(&r->shim.loop);
    (void)close(r->guest);
    (void)unlink(r->path);
    (void)rmdir(r->dir);
}

static inline int rig_client(struct rig *r)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    (void)snprintf(at.sun_path, sizeof at.sun_path, "%s", r->path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&at, sizeof at), 0);
    rig_turn(r);
    return fd;
}

static inline void say(int fd, uint8_t type, uint8_t number, uint16_t flags, uint32_t session,
                       uint32_t call, const void *payload, size_t len)
{
    uint8_t head[VHPC_HEADER];
    frame_pack(head, &(struct frame){.type = type,
                                     .fd = number,
                                     .flags = flags,
                                     .session = session,
                                     .call = call,
                                     .length = (uint32_t)len});
    assert_int_equal(write(fd, head, sizeof head), sizeof head);
    if (len > 0)
        assert_int_equal(write(fd, payload, len), len);
}

/* Next frame; false if there is none, or the peer has closed the connection. */
static inline bool hear(int fd, struct peer_frame *f)
{
    uint8_t head[VHPC_HEADER];
    if (read(fd, head, sizeof head) != (ssize_t)sizeof head)
        return false;
    assert_int_equal(frame_unpack(head, &f->head), 0);
    size_t got = 0;
    while (got < f->head.length) {
        ssize_t n = read(fd, f->payload + got, f->head.length - got);
        assert_true(n > 0);
        got += (size_t)n;
    }
    f->head.payload = f->payload;
    return true;
}

static inline bool hung_up(int fd)
{
    static struct peer_frame f;
    uint8_t byte;
    while (hear(fd, &f))
        ;
    return read(fd, &byte, 1) == 0;
}

static inline void say_hello(int fd, bool as_agent)
{
    struct buf b = {0};
    (void)tlv_put_u32(&b, TAG_VERSION_MIN, 1);
    (void)tlv_put_u32(&b, TAG_VERSION_MAX, 1);
    if (as_agent) {
        (void)tlv_put_str(&b, TAG_AGENT_VERSION, "9.9");
        (void)tlv_put_str(&b, TAG_BOOT_ID, "boot");
    }
    say(fd, VHPC_HELLO, 0, 0, 0, 0, buf_head(&b), b.len);
    buf_free(&b);
}

/* EXEC of one frame: fds 0 in, 1 and 2 out. */
static inline void say_exec(int fd, uint32_t session, uint32_t call, uint32_t uid)
{
    static const uint8_t fds[] = {0, 1, 1, 2, 2, 2};
    struct buf b = {0};
    (void)tlv_put(&b, TAG_FDS, fds, sizeof fds);
    (void)tlv_put_u32(&b, TAG_UID, uid);
    (void)tlv_put_u32(&b, TAG_GID, 0);
    (void)tlv_put_str(&b, TAG_ARG, "true");
    say(fd, VHPC_EXEC, 0, 0, session, call, buf_head(&b), b.len);
    buf_free(&b);
}

/* A client whose program (of session `session`) runs: the guest has sent STARTED. */
static inline int rig_running(struct rig *r, uint32_t session)
{
    static struct peer_frame f;
    int client = rig_client(r);
    say_hello(client, false);
    if (!r->shim.agent_up)
        say_hello(r->guest, true);
    rig_turn(r);
    while (hear(client, &f))
        assert_int_equal(f.head.type, VHPC_HELLO);
    say_exec(client, 0, 0, (uint32_t)getuid());
    rig_turn(r);
    while (hear(r->guest, &f))
        ;
    assert_int_equal(f.head.type, VHPC_EXEC);
    assert_int_equal(f.head.session, session);
    say(r->guest, VHPC_STARTED, 0, 0, session, 0, NULL, 0);
    rig_turn(r);
    assert_true(hear(client, &f));
    assert_int_equal(f.head.type, VHPC_STARTED);
    return client;
}

/* The shim hangs up on a client whose program runs and that says this; `which` is for the
 * message. */
static inline void rig_drops(void (*violation)(int), size_t which)
{
    struct rig r;
    rig_open(&r, getuid());
    int client = rig_running(&r, 1);
    violation(client);
    rig_turn(&r);
    if (!hung_up(client))
        fail_msg("violation %zu went unnoticed", which);
    assert_false(r.shim.ended);
    (void)close(client);
    rig_close(&r);
}

#endif
