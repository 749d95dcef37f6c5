/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The streams of one command at one of its ends.
 *
 * An inlet reads a local fd and sends DATA as far as there is credit. An outlet queues received
 * DATA (never more than a window), writes it to a local fd and returns credit for what was written.
 * Front (initiator) and task (executor) are each an exchange with additions of their own.
 */
#ifndef VHPC_EXCHANGE_H
#define VHPC_EXCHANGE_H

#include <stdbool.h>

#include "chan.h"
#include "flow.h"
#include "localfd.h"

struct exchange;

struct inlet {
    struct source source;
    struct exchange *exchange;
    uint8_t number;
    bool open;
    bool muted; /* the other end reads no more; what comes is seen, and discarded */
    enum localfd kind;
    bool pipe; /* a pipe, whose pages can be passed on without a copy */
};

struct outlet {
    struct source source;
    struct exchange *exchange;
    struct buf queue;
    uint32_t owed; /* credit to return */
    uint8_t number;
    bool open;
    enum localfd kind;
    bool regular; /* a regular file: writes of any size return soon */
    bool tty;     /* end of file is a character (VEOF) */
    bool eof;
    bool sync; /* the sender waits for all credit */
};

struct exchange {
    struct flow flow;
    enum flow_side side;
    struct loop *loop;
    struct chan *chan;
    uint32_t session;
    uint32_t call;
    bool live; /* after STARTED: data may flow */
    struct inlet inlet[VHPC_FDS_MAX];
    struct outlet outlet[VHPC_FDS_MAX];
    /* An inlet ended or an outlet emptied; may be NULL. */
    void (*changed)(struct exchange *);
    /*
     * Whether what was read may be sent; may be NULL. For a number above 2 it also gets what comes
     * when the other end reads no more: writing is no error then.
     */
    bool (*pass)(struct exchange *, uint8_t number, const uint8_t *data, size_t len);
    /* Whether this number is not read now; may be NULL. */
    bool (*quiet)(const struct exchange *, uint8_t number);
    /* Gets what the other end has sent, before it is written; may be NULL. */
    void (*heard)(struct exchange *, uint8_t number, const uint8_t *data, size_t len);
    /*
     * A regular file has no room for so many bytes: whether to discard them and continue. NULL, and
     * other errors of write(2): the other end is told that reading has ended.
     */
    bool (*no_room)(struct exchange *, size_t len, int error);
    void *owner;
};

void exchange_init(struct exchange *x, enum flow_side side, struct loop *loop, struct chan *chan,
                   uint32_t session, uint32_t call);
/*
 * Relay local fd `fd` as number `number` of the command. 0 or -ENOMEM; then the caller still owns
 * the fd.
 */
int exchange_read_from(struct exchange *x, uint8_t number, int fd, enum localfd kind);
int exchange_write_to(struct exchange *x, uint8_t number, int fd, enum localfd kind);
/*
 * Relay both directions of a non-blocking socket, which the exchange closes with the last of them.
 * 0 or -errno; then the socket is closed.
 */
int exchange_connect(struct exchange *x, uint8_t number, int fd);

/* Send a frame of this command if the rules still allow it. 0 or -errno. */
int exchange_send(struct exchange *x, uint8_t type, uint8_t number, uint16_t flags,
                  const void *payload, size_t len);
int exchange_send_tlv(struct exchange *x, uint8_t type, struct buf *payload);
/* Send EXEC with this message; 0 or -errno. */
int exchange_send_exec(struct exchange *x, const struct buf *message);
/* Check and apply a received frame. 0: done; 1: passed, the owner handles it; <0: -errno. */
int exchange_receive(struct exchange *x, const struct frame *f);

/* All inlets have ended. */
bool exchange_inlets_done(const struct exchange *x);
/* Nothing waits to be written locally. */
bool exchange_outlets_done(const struct exchange *x);
/* Some inlet is open and could send if its fd had data. */
bool exchange_inlets_idle(const struct exchange *x);
/* Tell a new initiator which lanes have ended. */
void exchange_repeat_ends(struct exchange *x);
/* End all inlets (EOF is sent where the rules allow). */
void exchange_end_inlets(struct exchange *x);
/* Close all local fds and discard all queues. */
void exchange_close(struct exchange *x);

#endif
