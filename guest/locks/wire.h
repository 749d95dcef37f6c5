/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages between the lock broker of a guest and vhpc-locks on its node, over a virtio-serial port
 * of their own. docs/guest-protocol.md has the rules: the guest asks, the node answers each request
 * before it reads the next one.
 */
#ifndef VHPC_LOCKS_WIRE_H
#define VHPC_LOCKS_WIRE_H

#include <stddef.h>
#include <stdint.h>

#define LOCKS_PORT_NAME "org.vhpc.locks.0"

enum {
    LOCKS_VERSION = 1,
    LOCKS_REQUEST = 40, /* bytes of a request without its texts */
    LOCKS_REPLY = 32,   /* the same of a reply */
    LOCKS_TEXT_MAX = 4096 + 64,
    LOCKS_FILES = 4096, /* files with locks at a time, numbered from 0 */
};

/* No lock ends behind this byte: the end of a lock "to the end of the file". */
#define LOCKS_END ((uint64_t)INT64_MAX)

enum locks_op {
    LOCKS_HELLO = 1, /* file: version of the guest; the reply lists the shares */
    LOCKS_SET,       /* set a range to a mode, without waiting; EAGAIN: somebody else has a lock */
    LOCKS_TEST,      /* whether somebody else's lock is in the way; the reply has it */
    LOCKS_CLOSE,     /* the guest has no locks on the file any more */
};

/* The locks of fcntl(2), which have ranges, and those of flock(2), whose range is the file. */
enum locks_kind { LOCKS_FCNTL, LOCKS_FLOCK, LOCKS_KINDS };

/* Ordered: a stronger mode has a higher number. */
enum locks_mode { LOCKS_FREE, LOCKS_SHARED, LOCKS_EXCLUSIVE };

struct locks_request {
    uint32_t id;
    uint8_t op, kind, mode;
    uint32_t file;       /* number that the guest has given to the file */
    uint64_t inode;      /* as the guest sees it; the node compares it */
    uint64_t start, end; /* first and last byte */
    const char *tag;     /* share and path in it, for SET and TEST; not owned */
    const char *path;
};

struct locks_reply {
    uint32_t id;
    uint32_t error;      /* errno, 0: success */
    uint8_t mode;        /* SET by flock: of the file now; TEST: of the other's lock */
    uint64_t start, end; /* TEST: of the other's lock */
    const char *text;    /* HELLO: a line "MODE TAG" for each share; not owned, no NUL at its end */
    uint32_t text_len;
};

/* Write a message; returns its length, 0 if a text is too long. */
size_t locks_pack_request(uint8_t out[LOCKS_REQUEST + LOCKS_TEXT_MAX],
                          const struct locks_request *r);
size_t locks_pack_reply(uint8_t out[LOCKS_REPLY + LOCKS_TEXT_MAX], const struct locks_reply *r);

/*
 * Read a message from the beginning of `len` bytes; its texts point into them. Returns its length,
 * 0 if it is not complete, or -EPROTO.
 */
int locks_unpack_request(const uint8_t *in, size_t len, struct locks_request *r);
int locks_unpack_reply(const uint8_t *in, size_t len, struct locks_reply *r);

#endif
