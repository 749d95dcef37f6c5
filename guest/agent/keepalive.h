/* SPDX-License-Identifier: Apache-2.0 */
/*
 * TCP keepalive for every connection between the guests of a job. A guest that is gone closes
 * nothing: without keepalive the other end waits without end if it does not send. The kernel of a
 * guest answers, so programs that are busy or stopped keep their connections.
 *
 * A network that fails for some seconds ends no connection, unless this guest has had ssh to or
 * from another guest: programs that ssh has started, as mpirun's daemons, end as early as ssh does.
 */
#ifndef VHPC_KEEPALIVE_H
#define VHPC_KEEPALIVE_H

#include <netinet/in.h>
#include <stdint.h>

#include "agent.h"

/* The addresses of the job's network. */
struct keepalive_network {
    struct in_addr ipv4;
    struct in_addr mask;
    struct in6_addr ipv6;
    uint32_t prefix6; /* 0: no IPv6 */
};

struct keepalive {
    int idle_s;     /* without a packet, before the first question */
    int interval_s; /* between questions */
    int count;      /* of questions without an answer that end the connection */
};

extern const struct keepalive keepalive_patient; /* ends a connection after a minute */
extern const struct keepalive keepalive_ssh;     /* after seven seconds */

/*
 * From now on connections of processes in this cgroup v2 and below to addresses of the network
 * have keepalive, unless the program sets other values afterwards: 0, or -errno if the kernel
 * cannot (before Linux 5.9, or without CONFIG_CGROUP_BPF).
 */
int keepalive_attach(const char *cgroup, const struct keepalive_network *n);
/* The same for the processes of this guest, once; what the kernel cannot do stays as it is. */
void keepalive_apply(struct agent *a, const struct keepalive_network *n);

#endif
