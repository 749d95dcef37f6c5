/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rules of one command: which party may send what, when, and how much.
 *
 * Both ends and the parties in between check each frame of a command with the same state machine,
 * so the first honest party that gets a violation detects it. The initiator asks for a program
 * (EXEC), the executor runs it. Each relayed fd has up to two lanes, one per sender; a lane has the
 * credit that its sender has left. A DATA frame costs its payload and its header, which bounds what
 * a party in between has to keep, even for frames of one byte.
 */
#ifndef VHPC_FLOW_H
#define VHPC_FLOW_H

#include <stdbool.h>
#include <stdint.h>

#include "frame.h"

enum flow_side { FLOW_INITIATOR = 0, FLOW_EXECUTOR = 1 };

enum flow_phase {
    FLOW_IDLE,    /* no EXEC yet */
    FLOW_ASKING,  /* EXEC has begun, more parts follow */
    FLOW_ASKED,   /* EXEC is complete */
    FLOW_RUNNING, /* after STARTED: data may flow */
    FLOW_ENDED,   /* after EXIT or ERROR of the executor */
    FLOW_CLOSED,  /* after CLOSE of the initiator */
};

enum flow_verdict {
    FLOW_PASS,
    FLOW_DROP,   /* the command ended while it was on its way, or it says nothing: ignore */
    FLOW_BROKEN, /* the sender violates the protocol; flow.why is the reason */
};

struct flow_lane {
    bool open;       /* the EXEC declared this lane */
    bool eof;        /* the sender has sent EOF */
    bool gone;       /* the receiver has sent EOF with VHPC_READER */
    bool asked;      /* the sender has sent SYNC, and no DATA or CREDIT has come since */
    uint32_t credit; /* bytes the sender may still send */
};

struct flow {
    enum flow_phase phase;
    uint32_t exec_len;                      /* bytes of EXEC so far */
    uint32_t uid;                           /* TAG_UID of the EXEC */
    struct flow_lane lane[VHPC_FDS_MAX][2]; /* [fd][sending side] */
    const char *why;
};

/* Check a frame that `from` has sent, and account for it if it passes. */
enum flow_verdict flow_check(struct flow *f, enum flow_side from, const struct frame *frame);

/* Bytes of payload that `from` may send on fd in its next DATA frame. */
uint32_t flow_room(const struct flow *f, enum flow_side from, uint8_t fd);

/* True if all output of the executor on fd is written, or has no reader. */
bool flow_settled(const struct flow *f, uint8_t fd);

/* The command has ended for the side that would still send. */
static inline bool flow_over(const struct flow *f)
{
    return f->phase == FLOW_ENDED || f->phase == FLOW_CLOSED;
}

#endif
