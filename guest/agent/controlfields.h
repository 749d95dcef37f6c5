/* SPDX-License-Identifier: Apache-2.0 */
/* The fields of a REQUEST. */
#ifndef VHPC_CONTROLFIELDS_H
#define VHPC_CONTROLFIELDS_H

#include <stdint.h>

#include "buf.h"
#include "cluster.h"
#include "hold.h"
#include "hostfile.h"
#include "ibports.h"
#include "identity.h"
#include "nat.h"
#include "network.h"
#include "reach.h"
#include "ssh.h"
#include "tlv.h"

struct control_fields {
    uint32_t id;
    uint32_t op;
    uint32_t read_only;
    uint32_t wait_ms;
    struct hold_want hold;
    struct reach_want reach;
    struct ib_want *fabric; /* NULL = no port or key was named */
    char *mount_tag;
    char *mount_path;
    char *mount_source;
    char *start_dir;
    struct buf environment; /* NAME=VALUE, each with its NUL */
    char *topology;
    struct network_want network;
    struct nat_want nat;
    char *nodelist;
    struct hostfile hosts;
    struct ssh_want ssh;
    struct cluster_want cluster;
    struct identity who;
};

/* Take one field; unknown ones are ignored. 0, -EPROTO or -ENOMEM. */
int control_field(const struct tlv *t, struct control_fields *r);
void control_free(struct control_fields *r);

#endif
