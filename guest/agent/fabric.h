/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fabric operation: no program starts in this guest before its InfiniBand ports are there, with
 * the job's key and no other. Then programs get variables with their ports and their key.
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
    char interface[IPOIB_NAME_MAX]; /* the interface with the job's key; "" = none */
    bool waiting;                   /* for the ports, for this request: */
    uint32_t session;
    uint32_t request;
    long long until;               /* ms */
    long long next;                /* next check */
    char *value[FABRIC_VARIABLES]; /* of the variables; NULL = not exported */
};

/*
 * Add the variables to a program's environment. A value that the user has set stays. A value that
 * the agent of another guest of the job has set is replaced. 0 or -ENOMEM.
 */
int fabric_environment(const struct fabric *f, struct execspec *spec);
/* Compute the variables' values from the ports that were found; 0 or -ENOMEM. */
int fabric_name(struct fabric *f);
void fabric_free(struct fabric *f);

#endif
