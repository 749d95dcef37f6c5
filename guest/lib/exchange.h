/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The streams of one command at one of its ends.
 *
 * An inlet reads a local fd and sends DATA as far as there is credit; an
 * outlet queues received DATA (never more than a window), writes it to a local
 * fd and gives credit back for what was written. Front (initiator) and task
 * (executor) are both an exchange plus what is their own.
 */
#ifndef VHPC_EXCHANGE_H
#define VHPC_EXCHANGE_H

#include <stdbool.h>

#include "chan.h"
#include "flow.h"

struct exchange;

struct inlet {
    struct source source;
    struct exchange *exchange;
    uint8_t number;
    bool open;
    bool shared;
    bool pipe; /* a pipe's pages can be handed on as they are */
};

struct outlet {
    struct source source;
    struct exchange *exchange;
    struct buf queue;
    uint32_t owed; /* credit to give back */
    uint8_t number;
    bool open;
    bool shared;  /* the open file is others' too: O_NONBLOCK may not be set on it */
    bool regular; /* a regular file: writes of any size return soon */
    bool tty;     /* end of file is a character here */
    bool eof;
};

struct exchange {
    struct flow flow;
    enum flow_side side;
    struct loop *loop;
    struct chan *chan;
    uint32_t session;
    uint32_t call;
    bool live; /* STARTED was said: data may flow */
    struct inlet inlet[VHPC_FDS_MAX];
    struct outlet outlet[VHPC_FDS_MAX];
    /* An inlet ended or an outlet emptied; may be NULL. */
    void (*changed)(struct exchange *);
    void *owner;
};

void exchange_init(struct exchange *x, enum flow_side side, struct loop *loop, struct chan *chan,
                   uint32_t session, uint32_t call);
/*
 * Relay local fd `fd` as number `number` of the command. A shared fd (stdio we
 * were given) is neither made non-blocking nor closed below 3. 0 or -ENOMEM.
 */
int exchange_read_from(struct exchange *x, uint8_t number, int fd, bool shared);
int exchange_write_to(struct exchange *x, uint8_t number, int fd, bool shared);

/* Send a frame of this command if the rules still allow it. 0 or -errno. */
int exchange_send(struct exchange *x, uint8_t type, uint8_t number, uint16_t flags,
                  const void *payload, size_t len);
int exchange_send_tlv(struct exchange *x, uint8_t type, struct buf *payload);
/* Send EXEC with this message; 0 or -errno. */
int exchange_send_exec(struct exchange *x, const struct buf *message);
/* Judge and apply a received frame. 0: done; 1: passed, the owner's to handle; <0: -errno. */
int exchange_receive(struct exchange *x, const struct frame *f);

/* Every inlet has ended. */
bool exchange_inlets_done(const struct exchange *x);
/* Nothing waits to be written locally. */
bool exchange_outlets_done(const struct exchange *x);
/* Some inlet is open and could send, had its fd anything to read. */
bool exchange_inlets_idle(const struct exchange *x);
/* End all inlets (EOF is sent where the rules allow). */
void exchange_end_inlets(struct exchange *x);
/* Close all local fds, forget all queues. */
void exchange_close(struct exchange *x);

#endif
