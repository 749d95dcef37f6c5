/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The nat operation: the guest's interface to other networks gets its name, MTU, IPv4 address and
 * default route, and the guest learns its DNS servers.
 */
#ifndef VHPC_NAT_H
#define VHPC_NAT_H

#include <netinet/in.h>
#include <stddef.h>

#include "agent.h"
#include "network.h"
#include "tlv.h"

enum { NAT_SERVERS_MAX = 3 }; /* resolv.conf(5), MAXNS */

/* Fields of the request, as they came. */
struct nat_want {
    char gateway[INET_ADDRSTRLEN];
    char server[NAT_SERVERS_MAX][INET_ADDRSTRLEN];
    size_t server_count;
};

/* Add TAG_NAMESERVER: 0, or -EPROTO if there are too many, or it is too long. */
int nat_add_server(struct nat_want *want, const struct tlv *t);
/* Check the addresses, given those of the interface: 0, or -EINVAL with one line in text. */
int nat_check(const struct nat_want *want, const struct network_plan *plan, char *text,
              size_t size);
/*
 * The operation, on the interface with the MAC address: 0, -ENODEV while no interface has it, or
 * -errno; with one line in text. It can be repeated.
 */
int nat_apply(const struct agent *a, const struct nat_want *want,
              const struct network_want *interface, char *text, size_t size);

#endif
