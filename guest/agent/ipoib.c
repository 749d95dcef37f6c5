/* SPDX-License-Identifier: Apache-2.0 */
#include "ipoib.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "readtext.h"

enum { PATH_SIZE = 512 };

/* A number in a sysfs attribute, in any base that strtoull knows; -1 without a number. */
static long read_number(const char *sysfs, const char *interface, const char *file)
{
    char path[PATH_SIZE], value[32];
    (void)snprintf(path, sizeof path, "%s/class/net/%s/%s", sysfs, interface, file);
    uint64_t number;
    return read_text(path, value, sizeof value) > 0 && text_is_number(value, 0, LONG_MAX, &number)
               ? (long)number
               : -1;
}

static bool is_interface(const char *name)
{
    size_t len = strlen(name);
    return name[0] != '.' && len < IPOIB_NAME_MAX && strpbrk(name, "/: \t\n") == NULL;
}

static int make_child(const char *sysfs, const char *parent, uint16_t entry)
{
    char path[PATH_SIZE], key[16];
    int n = snprintf(key, sizeof key, "0x%04x", entry);
    (void)snprintf(path, sizeof path, "%s/class/net/%s/create_child", sysfs, parent);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int rc = write(fd, key, (size_t)n) == n ? 0 : -errno;
    (void)close(fd);
    /* The kernel is already creating it. */
    return rc == -ENOTUNIQ || rc == -EEXIST ? 0 : rc;
}

int ipoib_interface(const char *sysfs, const struct ib_port *port, uint16_t entry,
                    char name[IPOIB_NAME_MAX], char *text, size_t size)
{
    char path[PATH_SIZE], parent[IPOIB_NAME_MAX] = "";
    bool found = false;
    (void)snprintf(path, sizeof path, "%s/class/infiniband/%s/device/net", sysfs, port->device);
    DIR *dir = opendir(path);
    for (const struct dirent *e; dir != NULL && !found && (e = readdir(dir)) != NULL;) {
        /* Ports count from 1, dev_port from 0. */
        if (!is_interface(e->d_name) ||
            read_number(sysfs, e->d_name, "type") != ARPHRD_INFINIBAND ||
            read_number(sysfs, e->d_name, "dev_port") + 1 != (long)port->number)
            continue;
        found = read_number(sysfs, e->d_name, "pkey") == entry;
        (void)snprintf(path, sizeof path, "%s/class/net/%s/create_child", sysfs, e->d_name);
        if (found)
            (void)snprintf(name, IPOIB_NAME_MAX, "%.15s", e->d_name);
        else if (access(path, F_OK) == 0)
            (void)snprintf(parent, sizeof parent, "%.15s", e->d_name);
    }
    if (dir != NULL)
        (void)closedir(dir);
    if (found)
        return 1;
    if (parent[0] == '\0') {
        (void)snprintf(text, size,
                       "%s port %u has no IPoIB interface (does the image have ib_ipoib?)",
                       port->device, port->number);
        return 0;
    }
    int rc = make_child(sysfs, parent, entry);
    (void)snprintf(text, size, "%s has no interface with the key 0x%04x: %s", parent, entry,
                   rc < 0 ? strerror(-rc) : "it is being created");
    return 0;
}

int ipoib_parse(const char *text, uint32_t *address, uint32_t *mask)
{
    char copy[INET_ADDRSTRLEN + 4];
    struct in_addr a;
    size_t len = strcspn(text, "/");
    if (strlen(text) >= sizeof copy || text[len] != '/')
        return -EINVAL;
    (void)snprintf(copy, sizeof copy, "%s", text);
    copy[len] = '\0';
    const char *bits = copy + len + 1;
    if (inet_pton(AF_INET, copy, &a) != 1 || strspn(bits, "0123456789") != strlen(bits) ||
        strlen(bits) == 0 || strlen(bits) > 2)
        return -EINVAL;
    long n = strtol(bits, NULL, 10);
    if (n < 1 || n > 31)
        return -EINVAL;
    *address = a.s_addr;
    *mask = htonl(UINT32_MAX << (32 - n));
    return 0;
}

static void put_address(struct sockaddr *to, uint32_t address)
{
    const struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = address};
    memcpy(to, &in, sizeof in);
}

int ipoib_bring_up(const char *name, uint32_t address, uint32_t mask, char *text, size_t size)
{
    struct ifreq request = {0};
    (void)snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    int rc = 0, fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        rc = -errno;
    put_address(&request.ifr_addr, address);
    if (rc == 0 && ioctl(fd, SIOCSIFADDR, &request) < 0)
        rc = -errno;
    put_address(&request.ifr_netmask, mask);
    if (rc == 0 && ioctl(fd, SIOCSIFNETMASK, &request) < 0)
        rc = -errno;
    if (rc == 0 && ioctl(fd, SIOCGIFFLAGS, &request) < 0)
        rc = -errno;
    request.ifr_flags |= IFF_UP;
    if (rc == 0 && ioctl(fd, SIOCSIFFLAGS, &request) < 0)
        rc = -errno;
    if (fd >= 0)
        (void)close(fd);
    if (rc < 0)
        (void)snprintf(text, size, "cannot give %s its address: %s", name, strerror(-rc));
    return rc;
}
