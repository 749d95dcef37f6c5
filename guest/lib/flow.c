/* SPDX-License-Identifier: Apache-2.0 */
#include "flow.h"

#include <stddef.h>

#include "tlv.h"

static enum flow_verdict broken(struct flow *f, const char *why)
{
    f->why = why;
    return FLOW_BROKEN;
}

/*
 * The first frame of an EXEC begins with TAG_FDS and TAG_UID, in this order: so the parties in
 * between know what they must enforce without keeping the message.
 */
static enum flow_verdict begin_exec(struct flow *f, const struct frame *frame)
{
    struct tlv_reader r = {frame->payload, frame->length};
    struct tlv fds, uid;
    if (tlv_next(&r, &fds) != 1 || fds.tag != TAG_FDS || tlv_next(&r, &uid) != 1 ||
        uid.tag != TAG_UID || tlv_u32(&uid, &f->uid) < 0)
        return broken(f, "EXEC does not begin with its fds and its uid");
    if (fds.len % 2 != 0 || fds.len > 2 * VHPC_FDS_MAX)
        return broken(f, "EXEC has a malformed fd list");
    for (uint32_t i = 0; i < fds.len; i += 2) {
        uint8_t fd = fds.data[i], dir = fds.data[i + 1];
        if (fd >= VHPC_FDS_MAX || dir < VHPC_FD_IN || dir > VHPC_FD_BOTH || f->lane[fd][0].open ||
            f->lane[fd][1].open)
            return broken(f, "EXEC has a malformed fd list");
        if (dir & VHPC_FD_IN)
            f->lane[fd][FLOW_INITIATOR] = (struct flow_lane){.open = true, .credit = VHPC_WINDOW};
        if (dir & VHPC_FD_OUT)
            f->lane[fd][FLOW_EXECUTOR] = (struct flow_lane){.open = true, .credit = VHPC_WINDOW};
    }
    return FLOW_PASS;
}

static enum flow_verdict check_exec(struct flow *f, enum flow_side from, const struct frame *frame)
{
    if (from != FLOW_INITIATOR)
        return broken(f, "EXEC from the executor");
    if (f->phase != FLOW_IDLE && f->phase != FLOW_ASKING)
        return broken(f, "a second EXEC");
    if (frame->length > VHPC_MESSAGE_MAX - f->exec_len)
        return broken(f, "EXEC is longer than a message may be");
    if (f->phase == FLOW_IDLE) {
        enum flow_verdict v = begin_exec(f, frame);
        if (v != FLOW_PASS)
            return v;
    } else if (frame->length == 0) {
        /* An empty part would allow a message without end. */
        return broken(f, "an empty continuation of EXEC");
    }
    f->exec_len += frame->length;
    f->phase = frame->flags & VHPC_MORE ? FLOW_ASKING : FLOW_ASKED;
    return FLOW_PASS;
}

static enum flow_verdict check_data(struct flow *f, enum flow_side from, const struct frame *frame)
{
    struct flow_lane *lane = &f->lane[frame->fd][from];
    if (!lane->open)
        return broken(f, "DATA on an fd that EXEC did not declare");
    if (lane->eof)
        return broken(f, "DATA after EOF");
    if (frame->length == 0)
        return broken(f, "DATA without data");
    if (frame->length + VHPC_HEADER > lane->credit)
        return broken(f, "DATA without credit for it");
    lane->credit -= frame->length + VHPC_HEADER;
    lane->asked = false;
    return FLOW_PASS;
}

static enum flow_verdict check_eof(struct flow *f, enum flow_side from, const struct frame *frame)
{
    bool reader = (frame->flags & VHPC_READER) != 0;
    struct flow_lane *lane = &f->lane[frame->fd][reader ? 1 - from : from];
    bool *said = reader ? &lane->gone : &lane->eof;
    if (!lane->open)
        return broken(f, "EOF on an fd that EXEC did not declare");
    if (frame->length != 0)
        return broken(f, "EOF with a payload");
    if (*said)
        return broken(f, "a second EOF");
    *said = true;
    return FLOW_PASS;
}

static enum flow_verdict check_credit(struct flow *f, enum flow_side from,
                                      const struct frame *frame)
{
    struct flow_lane *lane = &f->lane[frame->fd][1 - from];
    if (!lane->open || frame->length != 4)
        return broken(f, "a malformed CREDIT");
    uint32_t grant = get_le32(frame->payload);
    if (grant == 0 || grant > VHPC_WINDOW - lane->credit)
        return broken(f, "CREDIT for bytes that were never sent");
    lane->credit += grant;
    lane->asked = false;
    return FLOW_PASS;
}

/*
 * Also after EOF: what was sent before may not be written yet. One that asks for nothing new is no
 * violation, because a CREDIT may be on its way to the sender; it is not passed on, so that a party
 * in between need not queue any number of them.
 */
static enum flow_verdict check_sync(struct flow *f, enum flow_side from, const struct frame *frame)
{
    struct flow_lane *lane = &f->lane[frame->fd][FLOW_EXECUTOR];
    if (from != FLOW_EXECUTOR)
        return broken(f, "SYNC from the initiator");
    if (!lane->open || frame->length != 0)
        return broken(f, "a malformed SYNC");
    if (lane->asked || lane->credit == VHPC_WINDOW)
        return FLOW_DROP;
    lane->asked = true;
    return FLOW_PASS;
}

static enum flow_verdict check_control(struct flow *f, enum flow_side from,
                                       const struct frame *frame)
{
    if (from != FLOW_INITIATOR)
        return broken(f, "SIGNAL or WINSIZE from the executor");
    if (frame->type == VHPC_WINSIZE)
        return frame->length == 8 ? FLOW_PASS : broken(f, "a malformed WINSIZE");
    if (frame->length != 4)
        return broken(f, "a malformed SIGNAL");
    uint32_t number = get_le32(frame->payload);
    return number >= 1 && number <= 64 ? FLOW_PASS : broken(f, "SIGNAL with an invalid number");
}

static enum flow_verdict check_end(struct flow *f, enum flow_side from, const struct frame *frame)
{
    if (from != FLOW_EXECUTOR)
        return broken(f, "an executor's message from the initiator");
    if (frame->type == VHPC_STARTED) {
        if (f->phase != FLOW_ASKED)
            return broken(f, "a second STARTED");
        f->phase = FLOW_RUNNING;
        return FLOW_PASS;
    }
    if (frame->type == VHPC_EXIT && f->phase != FLOW_RUNNING)
        return broken(f, "EXIT of a program that was not started");
    f->phase = FLOW_ENDED;
    return FLOW_PASS;
}

enum flow_verdict flow_check(struct flow *f, enum flow_side from, const struct frame *frame)
{
    if (f->phase == FLOW_CLOSED)
        return from == FLOW_EXECUTOR ? FLOW_DROP : broken(f, "a frame after CLOSE");
    if (f->phase == FLOW_ENDED && frame->type != VHPC_CLOSE)
        return from == FLOW_INITIATOR ? FLOW_DROP : broken(f, "a frame after the end");
    if (frame->type != VHPC_EXEC && (frame->flags & VHPC_MORE))
        return broken(f, "this message may not have several frames");
    if (frame->type != VHPC_EOF && (frame->flags & VHPC_READER))
        return broken(f, "a flag that belongs to EOF");
    if (frame->type == VHPC_CLOSE) {
        if (from != FLOW_INITIATOR || frame->length != 0)
            return broken(f, "a malformed CLOSE");
        f->phase = FLOW_CLOSED;
        return FLOW_PASS;
    }
    if (frame->type == VHPC_EXEC)
        return check_exec(f, from, frame);
    if (f->phase != FLOW_ASKED && f->phase != FLOW_RUNNING)
        return broken(f, "a frame before EXEC is complete");
    if (frame->fd >= VHPC_FDS_MAX)
        return broken(f, "an fd out of range");

    switch (frame->type) {
    case VHPC_SIGNAL:
    case VHPC_WINSIZE:
        return check_control(f, from, frame);
    case VHPC_STARTED:
    case VHPC_EXIT:
    case VHPC_ERROR:
        return check_end(f, from, frame);
    default:
        break;
    }
    if (f->phase != FLOW_RUNNING)
        return broken(f, "data before STARTED");
    switch (frame->type) {
    case VHPC_DATA:
        return check_data(f, from, frame);
    case VHPC_EOF:
        return check_eof(f, from, frame);
    case VHPC_CREDIT:
        return check_credit(f, from, frame);
    case VHPC_SYNC:
        return check_sync(f, from, frame);
    default:
        return broken(f, "a frame that does not belong to a command");
    }
}

uint32_t flow_room(const struct flow *f, enum flow_side from, uint8_t fd)
{
    const struct flow_lane *lane = &f->lane[fd][from];
    if (f->phase != FLOW_RUNNING || !lane->open || lane->eof || lane->gone ||
        lane->credit <= VHPC_HEADER)
        return 0;
    return lane->credit - VHPC_HEADER;
}

bool flow_settled(const struct flow *f, uint8_t fd)
{
    const struct flow_lane *lane = &f->lane[fd][FLOW_EXECUTOR];
    return !lane->open || lane->gone || lane->credit == VHPC_WINDOW;
}
