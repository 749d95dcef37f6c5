/* SPDX-License-Identifier: Apache-2.0 */
#include "network.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_arp.h>
#include <linux/ipv6.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "defaults.h"
#include "keepalive.h"

#define VARIABLE "VHPC_NODELIST"
#define MARK "VHPC_INTERFACE"

/* ADDRESS/N, with N from 1 to most: 0, or -EINVAL. */
static int parse_address(int family, const char *text, void *address, uint32_t most,
                         uint32_t *prefix)
{
    char copy[NETWORK_ADDRESS_MAX];
    size_t len = strcspn(text, "/");
    const char *bits = text + len + 1;
    if (strlen(text) >= sizeof copy || text[len] != '/')
        return -EINVAL;
    (void)snprintf(copy, sizeof copy, "%s", text);
    copy[len] = '\0';
    size_t digits = strspn(bits, "0123456789");
    if (inet_pton(family, copy, address) != 1 || digits == 0 || digits > 3 || bits[digits] != '\0')
        return -EINVAL;
    *prefix = (uint32_t)strtoul(bits, NULL, 10);
    return *prefix >= 1 && *prefix <= most ? 0 : -EINVAL;
}

static bool is_interface_name(const char *name)
{
    size_t len = strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789");
    return len > 0 && len < IFNAMSIZ && name[len] == '\0';
}

int network_check(const struct network_want *want, struct network_plan *plan, char *text,
                  size_t size)
{
    static const uint8_t zero[NETWORK_MAC];
    uint32_t prefix = 0;
    const char *wrong = NULL;
    if (!want->has_mac || (want->mac[0] & 1) != 0 || memcmp(want->mac, zero, sizeof zero) == 0)
        wrong = "MAC is not the address of an interface";
    else if (!is_interface_name(want->name))
        wrong = "INTERFACE is not a name";
    else if (want->mtu < NETWORK_MTU_MIN || want->mtu > NETWORK_MTU_MAX)
        wrong = "MTU is not from 1280 to 65535";
    else if (parse_address(AF_INET, want->ipv4, &plan->ipv4, 31, &prefix) < 0)
        wrong = "IPV4 is not an address with a prefix";
    else if (!want->ipv4_only &&
             parse_address(AF_INET6, want->ipv6, &plan->ipv6, 127, &plan->prefix6) < 0)
        wrong = "IPV6 is not an address with a prefix";
    if (wrong != NULL) {
        (void)snprintf(text, size, "%s", wrong);
        return -EINVAL;
    }
    plan->mask.s_addr = htonl(UINT32_MAX << (32 - prefix));
    return 0;
}

static void put_name(struct ifreq *request, const char *name)
{
    *request = (struct ifreq){0};
    (void)snprintf(request->ifr_name, sizeof request->ifr_name, "%s", name);
}

/* The name of the interface with this address: 0, or -errno. */
static int find_interface(int fd, const uint8_t mac[NETWORK_MAC], char name[IFNAMSIZ])
{
    struct if_nameindex *all = if_nameindex();
    int rc = all == NULL ? -errno : -ENODEV;
    for (const struct if_nameindex *i = all; rc == -ENODEV && i != NULL && i->if_name != NULL;
         i++) {
        struct ifreq request;
        put_name(&request, i->if_name);
        if (ioctl(fd, SIOCGIFHWADDR, &request) < 0 ||
            request.ifr_hwaddr.sa_family != ARPHRD_ETHER ||
            memcmp(request.ifr_hwaddr.sa_data, mac, NETWORK_MAC) != 0)
            continue;
        (void)snprintf(name, IFNAMSIZ, "%s", i->if_name);
        rc = 0;
    }
    if (all != NULL)
        if_freenameindex(all);
    return rc;
}

static int set_flags(int fd, const char *name, bool up)
{
    struct ifreq request;
    put_name(&request, name);
    if (ioctl(fd, SIOCGIFFLAGS, &request) < 0)
        return -errno;
    request.ifr_flags = (short)(up ? request.ifr_flags | IFF_UP : request.ifr_flags & ~IFF_UP);
    return ioctl(fd, SIOCSIFFLAGS, &request) < 0 ? -errno : 0;
}

/* An interface can be renamed while it is down. */
static int rename_interface(int fd, const char *from, const char *to)
{
    struct ifreq request;
    if (strcmp(from, to) == 0)
        return 0;
    int rc = set_flags(fd, from, false);
    if (rc < 0)
        return rc;
    put_name(&request, from);
    (void)snprintf(request.ifr_newname, sizeof request.ifr_newname, "%s", to);
    return ioctl(fd, SIOCSIFNAME, &request) < 0 ? -errno : 0;
}

static int set_mtu(int fd, const char *name, uint32_t mtu)
{
    struct ifreq request;
    put_name(&request, name);
    request.ifr_mtu = (int)mtu;
    return ioctl(fd, SIOCSIFMTU, &request) < 0 ? -errno : 0;
}

static int set_ipv4(int fd, const char *name, const struct network_plan *plan)
{
    struct ifreq request;
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr = plan->ipv4};
    put_name(&request, name);
    memcpy(&request.ifr_addr, &in, sizeof in);
    if (ioctl(fd, SIOCSIFADDR, &request) < 0)
        return -errno;
    in.sin_addr = plan->mask;
    memcpy(&request.ifr_netmask, &in, sizeof in);
    return ioctl(fd, SIOCSIFNETMASK, &request) < 0 ? -errno : 0;
}

/* A value that cannot be set keeps the kernel's default. */
static void set_sysctl(const char *path, const char *value)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    (void)!write(fd, value, strlen(value));
    (void)close(fd);
}

/*
 * The address can be used at once: no other guest has it, and the nodes drop the frames that look
 * for duplicates. No router advertises routes on this network.
 */
static void set_ipv6_options(const char *name, bool ipv4_only)
{
    static const char *const options[] = {"accept_dad", "dad_transmits", "accept_ra"};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        char path[128];
        (void)snprintf(path, sizeof path, "/proc/sys/net/ipv6/conf/%s/%s", name, options[i]);
        set_sysctl(path, "0"); /* without it the address takes a second longer */
    }
    if (ipv4_only) {
        char path[128];
        (void)snprintf(path, sizeof path, "/proc/sys/net/ipv6/conf/%s/disable_ipv6", name);
        set_sysctl(path, "1");
    }
}

static int set_ipv6(const char *name, const struct network_plan *plan)
{
    struct in6_ifreq request = {
        .ifr6_addr = plan->ipv6,
        .ifr6_prefixlen = plan->prefix6,
        .ifr6_ifindex = (int)if_nametoindex(name),
    };
    int fd = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    int rc = ioctl(fd, SIOCSIFADDR, &request) < 0 && errno != EEXIST ? -errno : 0;
    (void)close(fd);
    return rc;
}

int network_configure(const struct network_want *want, const struct network_plan *plan, char *text,
                      size_t size)
{
    char name[IFNAMSIZ] = "";
    const char *what = "find the interface of the job's network (does the image have virtio_net?)";
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int rc = fd < 0 ? -errno : find_interface(fd, want->mac, name);
    if (rc == 0) {
        what = "rename the interface";
        rc = rename_interface(fd, name, want->name);
    }
    if (rc == 0) {
        what = "set the MTU";
        rc = set_mtu(fd, want->name, want->mtu);
    }
    if (rc == 0) {
        what = "set the IPv4 address";
        rc = set_ipv4(fd, want->name, plan);
    }
    if (rc == 0) {
        what = "bring the interface up";
        set_ipv6_options(want->name, want->ipv4_only);
        rc = set_flags(fd, want->name, true);
    }
    if (rc == 0) {
        what = "set the IPv6 address";
        rc = want->ipv4_only ? 0 : set_ipv6(want->name, plan);
        /* ping for everybody, as systemd has it: the image has no file capabilities */
        set_sysctl("/proc/sys/net/ipv4/ping_group_range", "0 2147483647");
    }
    if (fd >= 0)
        (void)close(fd);
    if (rc < 0)
        (void)snprintf(text, size, "cannot %s: %s", what, strerror(-rc));
    return rc;
}

/* Host names with commas between them. */
static bool is_nodelist(const char *list)
{
    size_t len = strlen(list);
    return len > 0 && len <= NODELIST_MAX &&
           strspn(list, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.-,") == len;
}

static int replace(char **text, const char *by)
{
    char *copy = strdup(by);
    if (copy == NULL)
        return -ENOMEM;
    free(*text);
    *text = copy;
    return 0;
}

int network_apply(struct agent *a, const struct network_want *want, const char *nodelist,
                  char *text, size_t size)
{
    struct network_plan plan = {0};
    int rc = network_check(want, &plan, text, size);
    if (rc == 0 && nodelist != NULL && !is_nodelist(nodelist)) {
        (void)snprintf(text, size, "NODELIST is not a list of host names");
        rc = -EINVAL;
    }
    if (rc == 0 && a->system)
        rc = network_configure(want, &plan, text, size);
    if (rc == 0 && a->system)
        keepalive_apply(a, &(struct keepalive_network){.ipv4 = plan.ipv4,
                                                       .mask = plan.mask,
                                                       .ipv6 = plan.ipv6,
                                                       .prefix6 = plan.prefix6});
    if (rc == 0) {
        a->job_ipv4 = plan.ipv4;
        a->job_ipv6 = plan.ipv6;
        rc = replace(&a->interface, want->name);
    }
    return rc == 0 && nodelist != NULL ? replace(&a->nodelist, nodelist) : rc;
}

/* Ranks that meet on another interface, whose addresses are the same in each guest, would hang. */
static int pin_transports(const struct agent *a, struct execspec *spec)
{
    const struct default_value list[] = {
        {.name = "FI_TCP_IFACE", .value = a->interface},       /* libfabric */
        {.name = "GLOO_SOCKET_IFNAME", .value = a->interface}, /* PyTorch */
        {.name = "NCCL_SOCKET_IFNAME", .value = a->interface},
        {.name = "OMPI_MCA_btl_tcp_if_include", .value = a->interface}, /* Open MPI */
        /* Open MPI 5 warns of each process if an interface has addresses of both families. */
        {.name = "OMPI_MCA_btl_tcp_disable_family", .value = "6"},
        {.name = "OMPI_MCA_oob_tcp_if_include",
         .value = a->interface},                                     /* daemons up to version 4 */
        {.name = "PRTE_MCA_prte_if_include", .value = a->interface}, /* and since version 5 */
        {.name = "UCX_NET_DEVICES", .value = a->interface}, /* adapters are better, see fabric.c */
    };
    return defaults_apply(spec, MARK, list, sizeof list / sizeof *list);
}

int network_environment(const struct agent *a, struct execspec *spec)
{
    char *entry = NULL;
    int rc = a->interface != NULL ? pin_transports(a, spec) : 0;
    if (rc < 0 || a->nodelist == NULL)
        return rc;
    execspec_drop_env(spec, VARIABLE "=");
    if (asprintf(&entry, VARIABLE "=%s", a->nodelist) < 0)
        return -ENOMEM;
    rc = execspec_add_env(spec, entry);
    free(entry);
    return rc;
}
