/* SPDX-License-Identifier: Apache-2.0 */
#include "devnodes.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <linux/netlink.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "accounts.h"

enum { TTY_GROUP = 5 };

/* The rules of systemd 257 (50-udev-default.rules) and rdma-core for what users of a job need. */
static const struct rule {
    const char *folder; /* below /dev */
    const char *name;   /* pattern of fnmatch(3) */
    mode_t mode;
    const char *group; /* NULL: root */
} rules[] = {
    {"", "fuse", 0666, NULL},
    {"", "kvm", 0666, "kvm"},
    {"", "vhost-net", 0666, "kvm"},
    {"", "vhost-vsock", 0666, "kvm"},
    {"", "vsock", 0666, NULL},
    {"", "kfd", 0666, "render"},
    {"", "loop-control", 0660, "disk"},
    {"", "video[0-9]*", 0660, "video"},
    {"net", "tun", 0666, NULL},
    {"vfio", "vfio", 0666, NULL},
    {"accel", "accel[0-9]*", 0666, "render"},
    {"dri", "card[0-9]*", 0660, "video"},
    {"dri", "renderD[0-9]*", 0666, "render"},
    {"infiniband", "rdma_cm", 0666, NULL},
    {"infiniband", "uverbs[0-9]*", 0666, NULL},
};

/* A node that udev or the image has changed stays as it is. */
static bool is_as_the_kernel_made_it(int folder, const char *name)
{
    struct stat st;
    return fstatat(folder, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISCHR(st.st_mode) &&
           st.st_uid == 0 && st.st_gid == 0 && (st.st_mode & 0077) == 0;
}

static void apply(const struct rule *rule, const char *dev, const char *groups)
{
    char path[256];
    (void)snprintf(path, sizeof path, "%s/%s", dev, rule->folder);
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;) {
        const int fd = dirfd(folder);
        if (fnmatch(rule->name, entry->d_name, 0) != 0 ||
            !is_as_the_kernel_made_it(fd, entry->d_name))
            continue;
        const gid_t group = rule->group != NULL ? accounts_number(groups, rule->group) : 0;
        if (fchownat(fd, entry->d_name, 0, group, AT_SYMLINK_NOFOLLOW) < 0 ||
            fchmodat(fd, entry->d_name, rule->mode, 0) < 0)
            (void)fprintf(stderr, "vhpc-agent: %s/%s: %s\n", path, entry->d_name, strerror(errno));
    }
    if (folder != NULL)
        (void)closedir(folder);
}

void devnodes_apply(const char *dev, const char *groups)
{
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        apply(&rules[i], dev, groups);
}

static void regroup(const struct rule *rule, const char *dev, gid_t from, gid_t to)
{
    char path[256];
    struct stat st;
    (void)snprintf(path, sizeof path, "%s/%s", dev, rule->folder);
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;) {
        const int fd = dirfd(folder);
        if (fnmatch(rule->name, entry->d_name, 0) == 0 &&
            fstatat(fd, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISCHR(st.st_mode) &&
            st.st_gid == from && fchownat(fd, entry->d_name, 0, to, AT_SYMLINK_NOFOLLOW) < 0)
            (void)fprintf(stderr, "vhpc-agent: %s/%s: %s\n", path, entry->d_name, strerror(errno));
    }
    if (folder != NULL)
        (void)closedir(folder);
}

void devnodes_regroup(const char *dev, const char *groups, const char *name, gid_t number)
{
    const gid_t old = accounts_number(groups, name);
    for (size_t i = 0; old != 0 && old != number && i < sizeof rules / sizeof rules[0]; i++)
        if (rules[i].group != NULL && strcmp(rules[i].group, name) == 0)
            regroup(&rules[i], dev, old, number);
}

gid_t devnodes_terminal_group(const char *groups)
{
    const gid_t tty = accounts_number(groups, "tty");
    return tty != 0 && tty != (gid_t)-1 ? tty : TTY_GROUP;
}

static short want_input(struct source *s)
{
    (void)s;
    return POLLIN;
}

/* The kernel has added or removed devices; many of them are one look at /dev. */
static void events_ready(struct source *source, short revents)
{
    char message[8192];
    (void)revents;
    while (recv(source->fd, message, sizeof message, 0) > 0 || errno == ENOBUFS)
        continue;
    devnodes_apply("/dev", "/etc/group");
}

int devnodes_watch(struct loop *loop)
{
    static struct source events = {.want = want_input, .ready = events_ready};
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK, .nl_groups = 1};
    int fd = socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, NETLINK_KOBJECT_UEVENT);
    if (fd < 0 || bind(fd, (struct sockaddr *)&kernel, sizeof kernel) < 0) {
        const int number = errno;
        if (fd >= 0)
            (void)close(fd);
        return -number;
    }
    events.fd = fd;
    return loop_add(loop, &events);
}
