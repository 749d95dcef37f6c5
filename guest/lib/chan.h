/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection that carries frames: unix socket or virtio-serial port.
 *
 * Reads whole frames, passes each to on_frame, and queues what is sent. Reads stop while may_read
 * returns false; sends never block. The owner limits the queue: it looks at chan_queued() before it
 * produces more. If the queue exceeds out_limit nevertheless, the connection is closed.
 *
 * With moves_pages, the output of a program goes from its pipe into a virtio-serial port without a
 * copy: its pages are moved to a pipe of the connection, after the header, and from there into the
 * port. In an emulated guest, which copies slowly, this saves most of the time of a stream. In
 * other guests it is slower, because QEMU passes on a page at a time, but 32 KiB at a time of what
 * was copied.
 */
#ifndef VHPC_CHAN_H
#define VHPC_CHAN_H

#include <stdbool.h>
#include <stddef.h>

#include "buf.h"
#include "frame.h"
#include "loop.h"
#include "passfd.h"

enum {
    CHAN_HIGH = 512 << 10,     /* producers pause while more than this is queued */
    CHAN_READ = 256 << 10,     /* bytes read per turn, so that connections take turns */
    CHAN_HEAD = 4 << 10,       /* bytes read at once while `places` is set */
    CHAN_OUT_LIMIT = 64 << 20, /* default of out_limit */
};

struct chan {
    struct source source;
    struct loop *loop;
    struct buf in;
    struct buf out;
    int stage[2];  /* pipe that holds a payload on its way into the port; made on first use */
    size_t staged; /* bytes in it, including the header if it is there, */
    size_t ahead;  /* to be sent after this number of bytes of out */
    size_t out_limit;
    struct passed gives; /* descriptors that travel with what is sent next; closed then */
    struct passed takes; /* descriptors that have come; closed by chan_release() */
    bool may_take;       /* otherwise the kernel closes what comes */
    struct frame placed; /* header of the frame whose payload is being received into */
    uint8_t *place;      /* this place; NULL: into `in` */
    size_t filled;       /* bytes of it that are there */
    bool port;           /* a virtio-serial port: read() = 0 and POLLHUP mean "no host" */
    bool moves_pages;    /* see above; for ports only */
    bool closed;
    bool finishing;  /* close after everything in the queue was sent */
    const char *why; /* reason, given by the function that set the last error */
    /* <0 (-errno) closes the connection with this error. */
    int (*on_frame)(struct chan *, const struct frame *);
    /* Once, when the peer closed (error 0), on errors, and on broken frames. */
    void (*on_close)(struct chan *, int error);
    bool (*may_read)(struct chan *);
    /*
     * A place for the payload of this frame, which has not arrived yet: room for its length, valid
     * until on_frame gets it or the connection is closed. NULL: here. May be NULL.
     */
    uint8_t *(*place_for)(struct chan *, const struct frame *);
    bool places; /* expect such payloads: read headers without much of what follows them */
    void *owner;
};

/* Take over a non-blocking fd and join the loop; 0 or -ENOMEM. */
int chan_open(struct chan *c, struct loop *loop, int fd);
/* Queue a frame; header fields from *f, f->length bytes of f->payload. 0 or -errno. */
int chan_send(struct chan *c, const struct frame *f);
/*
 * The same with a payload from a pipe that is known to have data: up to f->length bytes of it; sets
 * f->length. Only while chan_can_stage(). 0 or -errno.
 */
int chan_send_from_pipe(struct chan *c, struct frame *f, int pipe);
/* Queue a message of any length up to VHPC_MESSAGE_MAX, as several frames if need be. */
int chan_send_message(struct chan *c, uint8_t type, uint32_t session, uint32_t call,
                      const struct buf *message);
/* Leave the loop and close the fd now; on_close is not called. Idempotent. */
void chan_close(struct chan *c);
/* Free what is left of a closed connection; not from within its own callbacks. */
void chan_release(struct chan *c);
/* Send what is queued, then close and call on_close(0). Frames received meanwhile are ignored. */
void chan_finish(struct chan *c);
/* Set the reason for the -errno that on_frame is about to return. */
int chan_broken(struct chan *c, const char *why);

static inline size_t chan_queued(const struct chan *c)
{
    return c->out.len + c->staged;
}

/* One payload at a time, and only into ports. */
static inline bool chan_can_stage(const struct chan *c)
{
    return c->port && c->moves_pages && c->staged == 0;
}

/* The parts of a message of several frames, put together. */
struct message {
    uint8_t type; /* 0 = no message has begun */
    struct buf data;
};

/*
 * Add a frame. 1: complete, m->data is the message until message_reset(); 0: more parts follow;
 * -EPROTO: interleaved types, too long, or an empty part; -ENOMEM.
 */
int message_add(struct message *m, const struct frame *f);
void message_reset(struct message *m);

/* O_NONBLOCK and FD_CLOEXEC on; 0 or -errno. */
int fd_prepare(int fd);

/* A stream socket that is connected to the one at this path; -errno if that fails. */
int fd_connect(const char *path);

#endif
