/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The network operation: the guest's interface on the network of its job gets its name, MTU and
 * addresses, and programs learn the names of the job's guests.
 */
#ifndef VHPC_NETWORK_H
#define VHPC_NETWORK_H

#include <net/if.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "agent.h"
#include "execspec.h"

enum {
    NETWORK_MAC = 6,
    NETWORK_MTU_MIN = 1280, /* RFC 8200 */
    NETWORK_MTU_MAX = 65535,
    NETWORK_ADDRESS_MAX = INET6_ADDRSTRLEN + 4, /* with prefix and final NUL */
    NODELIST_MAX = 120000, /* bytes; the kernel's limit of a variable is 131072 */
};

/* Fields of the request, as they came. */
struct network_want {
    uint8_t mac[NETWORK_MAC];
    bool has_mac;
    char name[IFNAMSIZ];
    uint32_t mtu;
    char ipv4[NETWORK_ADDRESS_MAX]; /* A.B.C.D/N */
    char ipv6[NETWORK_ADDRESS_MAX]; /* ADDRESS/N */
    bool ipv4_only;                 /* no IPv6 on this interface, not even link-local */
};

/* The same, checked. */
struct network_plan {
    struct in_addr ipv4;
    struct in_addr mask;
    struct in6_addr ipv6;
    uint32_t prefix6;
};

/* 0, or -EINVAL with one line in text. */
int network_check(const struct network_want *want, struct network_plan *plan, char *text,
                  size_t size);
/*
 * Configure the interface of this machine that has the MAC address: 0, -ENODEV while no interface
 * has it, or -errno; with one line in text. It can be repeated.
 */
int network_configure(const struct network_want *want, const struct network_plan *plan, char *text,
                      size_t size);
/* The operation; nodelist may be NULL. 0, or -errno with one line in text. */
int network_apply(struct agent *a, const struct network_want *want, const char *nodelist,
                  char *text, size_t size);
/*
 * Set VHPC_NODELIST for a program, if the agent knows it, and let MPI libraries use the job's
 * network, unless the user has chosen otherwise. 0 or -ENOMEM.
 */
int network_environment(const struct agent *a, struct execspec *spec);

#endif
