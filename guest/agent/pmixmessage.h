/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages of PMIx 4 and later between a program and its server, as far as a checkpoint needs them.
 *
 * A message has a header of 16 bytes (sender, tag, length of the content, padding) and its content.
 * The first one of a program, the greeting, says who it is and how it encodes contents; the server
 * answers it with 8 bytes. In contents, integers have 7 bits in each byte, and a text has its
 * length before it and a zero at its end. The text that a server knows a step by is its namespace.
 */
#ifndef VHPC_AGENT_PMIXMESSAGE_H
#define VHPC_AGENT_PMIXMESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"

enum {
    PMIX_HEADER = 16,
    PMIX_COMMAND = 2,            /* bytes of a command, with its count, 1 */
    PMIX_GREETED = 8,            /* bytes of the answer to the greeting: status, and a number */
    PMIX_CONTENT_MAX = 16 << 20, /* a job of 100,000 tasks has less */
    PMIX_TAG_ANSWERED = 100,     /* a request has a tag from here on, and its answer the same */
    PMIX_NAMESPACE_MAX = 60,     /* with more, the length of the text needs a second byte */
};

/* Numbers of commands, the same in PMIx 4 to 6. */
enum pmix_command {
    PMIX_NO_COMMAND = -1,
    PMIX_REQUEST_JOB = 0,
    PMIX_COMMIT = 2,
    PMIX_GET = 4,
    PMIX_FINALIZE = 5,
    PMIX_PUBLISH = 6,
    PMIX_DISCONNECT = 11,
    PMIX_REGISTER_EVENTS = 13,
    PMIX_DEREGISTER_EVENTS = 14,
    PMIX_MONITOR = 19,
    PMIX_PULL_OUTPUT = 22,
    PMIX_LEAVE_GROUP = 28,
};

/* Whether bytes can be the beginning of a greeting. */
bool pmix_is_greeting(const uint8_t *data, size_t len);
/* Length of the first message; 0: it is not complete; -1: it is too long. */
long pmix_first(const uint8_t *data, size_t len, bool greeting);
uint32_t pmix_tag(const uint8_t *message);
enum pmix_command pmix_command(const uint8_t *message, size_t len);
/* Whether a greeting is one of a program, with an encoding and methods that are known here. */
bool pmix_knows(const uint8_t *greeting, size_t len);
/* Whether an answer says that all is well. */
bool pmix_is_good(const uint8_t *answer, size_t len);

/* The place of the namespace in a message. */
enum pmix_place {
    PMIX_IN_GREETING,
    PMIX_IN_CONTENT,
    PMIX_IN_OBJECTS, /* in the answer to PMIX_GET: in parts that have their lengths before them */
};

/* Append the message with another namespace in place of its own one; 0 or -ENOMEM. */
int pmix_rename(const uint8_t *message, size_t len, enum pmix_place place, const char *own,
                const char *other, struct buf *out);
/* Append a request that consists of a command; 0 or -ENOMEM. */
int pmix_put(struct buf *out, uint32_t tag, enum pmix_command command);

#endif
