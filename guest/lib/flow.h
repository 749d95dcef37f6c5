/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rules of one command: who may say what, and when, and how much.
 *
 * Both ends and everybody in between run every frame of a command through the
 * same state machine, so a violation is noticed by the first honest party it
 * passes. The initiator asks for a program (EXEC), the executor runs it. Each
 * relayed fd has up to two lanes, one per sender; a lane holds the credit its
 * sender has left. A DATA frame costs its payload plus its header, which
 * bounds the bytes a middle man has to keep even for one-byte frames.
 */
#ifndef VHPC_FLOW_H
#define VHPC_FLOW_H

#include <stdbool.h>
#include <stdint.h>

#include "frame.h"

enum flow_side { FLOW_INITIATOR = 0, FLOW_EXECUTOR = 1 };

enum flow_phase {
    FLOW_IDLE,    /* nothing asked yet */
    FLOW_ASKING,  /* EXEC has begun, more of it follows */
    FLOW_ASKED,   /* EXEC is complete */
    FLOW_RUNNING, /* STARTED was said: data may flow */
    FLOW_ENDED,   /* the executor said EXIT or ERROR */
    FLOW_CLOSED,  /* the initiator said CLOSE */
};

enum flow_verdict {
    FLOW_PASS,
    FLOW_DROP,   /* it crossed the end of the command on its way: harmless, ignore */
    FLOW_BROKEN, /* the sender violates the protocol; flow.why says how */
};

struct flow_lane {
    bool open;       /* the EXEC declared this lane */
    bool eof;        /* the sender said EOF */
    bool gone;       /* the receiver said EOF with VHPC_READER */
    uint32_t credit; /* bytes the sender may still send */
};

struct flow {
    enum flow_phase phase;
    uint32_t exec_len;                      /* bytes of EXEC so far */
    uint32_t uid;                           /* TAG_UID of the EXEC */
    struct flow_lane lane[VHPC_FDS_MAX][2]; /* [fd][sending side] */
    const char *why;
};

/* Judge a frame sent by `from`, and account for it when it passes. */
enum flow_verdict flow_check(struct flow *f, enum flow_side from, const struct frame *frame);

/* Bytes of payload that `from` may send on fd in its next DATA frame. */
uint32_t flow_room(const struct flow *f, enum flow_side from, uint8_t fd);

/* The command is over for the side that would still send. */
static inline bool flow_over(const struct flow *f)
{
    return f->phase == FLOW_ENDED || f->phase == FLOW_CLOSED;
}

#endif
