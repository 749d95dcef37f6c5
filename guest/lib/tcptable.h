/* SPDX-License-Identifier: Apache-2.0 */
/* The TCP sockets of this host, from /proc/net/tcp and tcp6, which any user can read. */
#ifndef VHPC_TCPTABLE_H
#define VHPC_TCPTABLE_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>

struct tcp_row {
    sa_family_t family;
    union {
        struct in_addr in;
        struct in6_addr in6;
    } local;
    uint16_t local_port; /* host byte order */
    uint16_t remote_port;
    bool listens;
    uint32_t uid; /* of the process that has made it */
    uint64_t inode;
};

/* A line of one of the files, which is divided; false if it is another one, such as the first. */
bool tcptable_line(char *line, sa_family_t family, struct tcp_row *row);
/* The first row that is wanted. */
bool tcptable_find(bool (*wanted)(const struct tcp_row *, const void *arg), const void *arg,
                   struct tcp_row *row);

#endif
