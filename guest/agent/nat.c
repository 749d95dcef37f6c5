/* SPDX-License-Identifier: Apache-2.0 */
#include "nat.h"

#include <arpa/inet.h>
#include <errno.h>
#include <net/route.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "file.h"

int nat_add_server(struct nat_want *want, const struct tlv *t)
{
    if (want->server_count == NAT_SERVERS_MAX)
        return -EPROTO;
    char *server = want->server[want->server_count++];
    return tlv_str_into(t, server, sizeof want->server[0]);
}

int nat_check(const struct nat_want *want, const struct network_plan *plan, char *text, size_t size)
{
    struct in_addr address;
    const char *wrong = NULL;
    if (inet_pton(AF_INET, want->gateway, &address) != 1 ||
        ((address.s_addr ^ plan->ipv4.s_addr) & plan->mask.s_addr) != 0 ||
        address.s_addr == plan->ipv4.s_addr)
        wrong = "GATEWAY is not another address of the interface's network";
    for (size_t i = 0; i < want->server_count; i++)
        if (inet_pton(AF_INET, want->server[i], &address) != 1)
            wrong = "NAMESERVER is not an IPv4 address";
    if (wrong == NULL)
        return 0;
    (void)snprintf(text, size, "%s", wrong);
    return -EINVAL;
}

static void put_address(struct sockaddr *to, struct in_addr address)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr = address};
    memcpy(to, &in, sizeof in);
}

static int add_default_route(const char *gateway)
{
    struct in_addr address;
    struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY};
    if (inet_pton(AF_INET, gateway, &address) != 1)
        return -EINVAL;
    put_address(&route.rt_gateway, address);
    put_address(&route.rt_dst, (struct in_addr){0});
    put_address(&route.rt_genmask, (struct in_addr){0});
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    int rc = ioctl(fd, SIOCADDRT, &route) < 0 && errno != EEXIST ? -errno : 0;
    (void)close(fd);
    return rc;
}

/* Without servers the image's own file stays. */
static int write_servers(const struct nat_want *want)
{
    char content[NAT_SERVERS_MAX * (INET_ADDRSTRLEN + sizeof "nameserver \n")];
    size_t used = 0;
    for (size_t i = 0; i < want->server_count; i++)
        used += (size_t)snprintf(content + used, sizeof content - used, "nameserver %s\n",
                                 want->server[i]);
    return used == 0 ? 0 : write_file("/etc/resolv.conf", 0644, content);
}

int nat_apply(const struct agent *a, const struct nat_want *want,
              const struct network_want *interface, char *text, size_t size)
{
    struct network_want own = *interface;
    struct network_plan plan = {0};
    own.ipv4_only = true;
    int rc = network_check(&own, &plan, text, size);
    rc = rc < 0 ? rc : nat_check(want, &plan, text, size);
    if (rc < 0 || !a->system)
        return rc;
    rc = network_configure(&own, &plan, text, size);
    if (rc < 0)
        return rc;
    if ((rc = add_default_route(want->gateway)) < 0)
        (void)snprintf(text, size, "cannot set the default route: %s", strerror(-rc));
    else if ((rc = write_servers(want)) < 0)
        (void)snprintf(text, size, "cannot write /etc/resolv.conf: %s", strerror(-rc));
    return rc;
}
