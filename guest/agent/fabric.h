/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fabric operation: nothing starts in this guest before its InfiniBand
 * ports are there, with the job's key and no other. Then programs are told
 * which ports and which key are theirs.
 */
#ifndef VHPC_FABRIC_H
#define VHPC_FABRIC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "execspec.h"
#include "ibports.h"
#include "ipoib.h"

enum {
    FABRIC_VARIABLES = 6,
    FABRIC_WAIT_MAX_MS = 600000, /* longest wait for the ports */
};

struct fabric {
    struct ib_want want;
    struct ib_found found;
    char interface[IPOIB_NAME_MAX]; /* with the job's key; "" = none */
    bool waiting;                   /* for the ports, on behalf of: */
    uint32_t session;
    uint32_t request;
    long long until;               /* ms */
    long long next;                /* look */
    char *value[FABRIC_VARIABLES]; /* of the variables; NULL = not exported */
};

/*
 * Put what programs are to know into their environment. A value of the user's
 * own stays; one that an agent of another guest of the job has put there is
 * replaced by ours. 0 or -ENOMEM.
 */
int fabric_environment(const struct fabric *f, struct execspec *spec);
/* The variables' values from what was found; 0 or -ENOMEM. */
int fabric_name(struct fabric *f);
void fabric_free(struct fabric *f);

#endif
