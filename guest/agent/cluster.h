/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cluster operation: which guests are in the cluster of this guest's job. Each request has all
 * of them and replaces what the one before has made.
 */
#ifndef VHPC_CLUSTER_H
#define VHPC_CLUSTER_H

#include <stddef.h>
#include <stdint.h>

#include "agent.h"
#include "buf.h"
#include "execspec.h"
#include "tlv.h"

enum {
    CLUSTER_GUESTS_MAX = 16384, /* also keys of each kind */
    CLUSTER_NAME_MAX = 129,     /* of an account, a slash, and a name */
};

/* Lines with one key each. */
struct cluster_keys {
    struct buf lines;
    size_t count;
};

/* Fields of the request, as what is written; texts without final NUL. */
struct cluster_want {
    char name[CLUSTER_NAME_MAX + 1];
    uint32_t job;        /* of this guest */
    uint32_t uid;        /* of the job's user */
    size_t count;        /* guests */
    struct buf hosts;    /* lines of /etc/hosts */
    struct buf slots;    /* lines "n1-j1234 slots=4" */
    struct buf machines; /* lines "n1-j1234:4" */
    struct buf list;     /* lines "n1-j1234" */
    struct buf members;  /* a JSON object per line */
    struct buf names;    /* "n1-j1234 n2-j1300" */
    struct cluster_keys host_keys;
    struct cluster_keys user_keys;
};

/* A GUEST, which has fields. 0, -EPROTO or -ENOMEM. */
int cluster_add_guest(struct cluster_want *want, const struct tlv *t);
/* A public key, whose line begins with a prefix. 0, -EPROTO or -ENOMEM. */
int cluster_add_key(struct cluster_keys *keys, const char *prefix, const struct tlv *t);
/* The operation: 0, or -errno with one line in text. */
int cluster_apply(struct agent *a, struct cluster_want *want, char *text, size_t size);
/* Lines of /etc/hosts that the agent has written last; empty without a cluster. */
const char *cluster_hosts(const struct agent *a);
/* Set the variables of the cluster for a program, or remove them. 0 or -ENOMEM. */
int cluster_environment(const struct agent *a, struct execspec *spec);
void cluster_free(struct cluster_want *want);
/* The agent forgets its cluster. */
void cluster_forget(struct agent *a);

#endif
