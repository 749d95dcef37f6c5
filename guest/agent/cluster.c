/* SPDX-License-Identifier: Apache-2.0 */
#include "cluster.h"

#include <arpa/inet.h>
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "file.h"
#include "hostfile.h"
#include "hosts.h"
#include "ssh.h"

/* State of the agent. */
struct cluster {
    char name[CLUSTER_NAME_MAX + 1];
    uint32_t job;
    char *hosts;
};

/* The fields of a GUEST. */
struct guest {
    char name[HOSTFILE_NAME_MAX + 1];
    char ipv4[INET_ADDRSTRLEN];
    char ipv6[INET6_ADDRSTRLEN];
    uint32_t job;
    uint32_t slots;
};

static int add_text(struct buf *b, const char *format, ...) __attribute__((format(printf, 2, 3)));

static int add_text(struct buf *b, const char *format, ...)
{
    char text[2 * HOSTFILE_NAME_MAX + 256]; /* a guest's two names, addresses and numbers */
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return n < 0 || (size_t)n >= sizeof text ? -EPROTO : buf_append(b, text, (size_t)n);
}

/* An address as inet_ntop(3) writes it. */
static int take_address(const struct tlv *t, int family, char *out, socklen_t size)
{
    char text[INET6_ADDRSTRLEN];
    struct in6_addr address; /* or that of IPv4, which is shorter */
    if (tlv_str_into(t, text, sizeof text) < 0 || inet_pton(family, text, &address) != 1 ||
        inet_ntop(family, &address, out, size) == NULL)
        return -EPROTO;
    return 0;
}

static int take_field(const struct tlv *t, struct guest *guest)
{
    switch (t->tag) {
    case TAG_HOSTNAME:
        return hostfile_is_name(t->data, t->len) ? tlv_str_into(t, guest->name, sizeof guest->name)
                                                 : -EPROTO;
    case TAG_JOB:
        return tlv_u32(t, &guest->job);
    case TAG_IPV4:
        return take_address(t, AF_INET, guest->ipv4, sizeof guest->ipv4);
    case TAG_IPV6:
        return take_address(t, AF_INET6, guest->ipv6, sizeof guest->ipv6);
    case TAG_CPUS:
        return tlv_u32(t, &guest->slots);
    default:
        return 0;
    }
}

int cluster_add_guest(struct cluster_want *want, const struct tlv *t)
{
    struct tlv_reader reader = {t->data, t->len};
    struct guest g = {0};
    struct tlv field;
    int rc;
    while ((rc = tlv_next(&reader, &field)) > 0)
        if ((rc = take_field(&field, &g)) < 0)
            break;
    if (rc < 0 || want->count == CLUSTER_GUESTS_MAX || g.name[0] == '\0' || g.ipv4[0] == '\0' ||
        g.ipv6[0] == '\0' || g.job == 0 || g.slots == 0 || g.slots > HOSTFILE_SLOTS_MAX)
        return -EPROTO;
    rc = add_text(&want->hosts, "%s %s\n%s %s\n", g.ipv4, g.name, g.ipv6, g.name);
    rc = rc < 0 ? rc : add_text(&want->slots, "%s slots=%u\n", g.name, g.slots);
    rc = rc < 0 ? rc : add_text(&want->machines, "%s:%u\n", g.name, g.slots);
    rc = rc < 0 ? rc : add_text(&want->list, "%s\n", g.name);
    rc = rc < 0 ? rc
                : add_text(&want->members,
                           "{\"host\": \"%s\", \"job\": %u, \"ipv4\": \"%s\", \"ipv6\": \"%s\", "
                           "\"slots\": %u}\n",
                           g.name, g.job, g.ipv4, g.ipv6, g.slots);
    rc = rc < 0 ? rc : add_text(&want->names, "%s%s", want->count > 0 ? " " : "", g.name);
    want->count += rc == 0 ? 1 : 0;
    return rc;
}

/* A line of a file of ssh that begins with the kind of a key, so it is no comment and no mark. */
static bool is_key(const uint8_t *key, size_t len)
{
    if (len == 0 || len > SSH_PUBLIC_MAX || key[0] < 'a' || key[0] > 'z')
        return false;
    for (size_t i = 0; i < len; i++)
        if (key[i] < ' ' || key[i] > '~')
            return false;
    return true;
}

int cluster_add_key(struct cluster_keys *keys, const char *prefix, const struct tlv *t)
{
    if (keys->count == CLUSTER_GUESTS_MAX || !is_key(t->data, t->len))
        return -EPROTO;
    int rc = buf_append(&keys->lines, prefix, strlen(prefix));
    rc = rc < 0 ? rc : buf_append(&keys->lines, t->data, t->len);
    rc = rc < 0 ? rc : buf_append(&keys->lines, "\n", 1);
    keys->count += rc == 0 ? 1 : 0;
    return rc;
}

#define NAME_BYTES "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"

/* Bytes at the beginning of a text that can be a name; 0 if it begins with a mark. */
static size_t name_length(const char *text, const char *allowed)
{
    return strchr("._-", text[0]) != NULL ? 0 : strspn(text, allowed);
}

/* NAME or ACCOUNT/NAME */
static bool is_cluster_name(const char *text)
{
    size_t account = name_length(text, NAME_BYTES ".");
    const char *name = account > 0 && text[account] == '/' ? text + account + 1 : text;
    size_t length = name_length(name, NAME_BYTES);
    return length > 0 && name[length] == '\0';
}

static int check(const struct cluster_want *want, char *text, size_t size)
{
    const char *wrong = NULL;
    if (!is_cluster_name(want->name))
        wrong = "CLUSTER is not the name of a cluster";
    else if (want->job == 0 || want->count == 0)
        wrong = "JOB or GUEST is missing";
    else if (want->user_keys.count > 0 && want->uid == 0)
        wrong = "USER_UID is 0";
    if (wrong == NULL)
        return 0;
    (void)snprintf(text, size, "%s", wrong);
    return -EINVAL;
}

/* End a text by a NUL, which is not part of its length. */
static int end_text(struct buf *b)
{
    int rc = buf_append(b, "", 1);
    b->len -= rc == 0 ? 1 : 0;
    return rc;
}

static int end_texts(struct cluster_want *want)
{
    int rc = end_text(&want->hosts);
    rc = rc < 0 ? rc : end_text(&want->names);
    rc = rc < 0 ? rc : end_text(&want->host_keys.lines);
    return rc < 0 ? rc : end_text(&want->user_keys.lines);
}

static int write_list(const char *folder, const char *name, const struct buf *list, char *text,
                      size_t size)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%s/%s", folder, name);
    int rc = n < 0 || (size_t)n >= sizeof path
                 ? -ENAMETOOLONG
                 : replace_file(path, 0644, buf_head(list), list->len);
    if (rc < 0)
        (void)snprintf(text, size, "%s/%s: %s", folder, name, strerror(-rc));
    return rc;
}

/* vhpc-members waits for the last file: when it changes, names and ssh of all members are known. */
static int write_all_files(const struct agent *a, const struct cluster_want *want, char *text,
                           size_t size)
{
    const struct ssh_cluster ssh = {.names = (const char *)buf_head(&want->names),
                                    .known = (const char *)buf_head(&want->host_keys.lines),
                                    .keys = (const char *)buf_head(&want->user_keys.lines),
                                    .uid = want->uid};
    const char *folder = a->cluster_folder;
    int rc = a->system ? hosts_put_block(HOSTS_FILE, (const char *)buf_head(&want->hosts)) : 0;
    if (rc < 0)
        (void)snprintf(text, size, HOSTS_FILE ": %s", strerror(-rc));
    rc = rc < 0 ? rc : ssh_apply_cluster(a, &ssh, text, size);
    if (rc < 0 || folder == NULL)
        return rc;
    if (mkdir(folder, 0755) < 0 && errno != EEXIST) {
        rc = -errno;
        (void)snprintf(text, size, "%s: %s", folder, strerror(-rc));
    }
    rc = rc < 0 ? rc : write_list(folder, "hostfile", &want->slots, text, size);
    rc = rc < 0 ? rc : write_list(folder, "machinefile", &want->machines, text, size);
    rc = rc < 0 ? rc : write_list(folder, "hosts", &want->list, text, size);
    return rc < 0 ? rc : write_list(folder, "members", &want->members, text, size);
}

int cluster_apply(struct agent *a, struct cluster_want *want, char *text, size_t size)
{
    int rc = check(want, text, size);
    if (rc < 0)
        return rc;
    struct cluster *now = calloc(1, sizeof *now);
    rc = now == NULL ? -ENOMEM : end_texts(want);
    if (rc == 0) {
        (void)snprintf(now->name, sizeof now->name, "%s", want->name);
        now->job = want->job;
        now->hosts = strdup((const char *)buf_head(&want->hosts));
        rc = now->hosts == NULL ? -ENOMEM : write_all_files(a, want, text, size);
    }
    if (rc < 0) {
        if (now != NULL)
            free(now->hosts);
        free(now);
        return rc;
    }
    cluster_forget(a);
    a->cluster = now;
    return 0;
}

const char *cluster_hosts(const struct agent *a)
{
    return a->cluster != NULL ? a->cluster->hosts : "";
}

int cluster_environment(const struct agent *a, struct execspec *spec)
{
    static const char *const names[] = {"VHPC_CLUSTER_NAME=", "VHPC_CLUSTER_JOB=",
                                        "VHPC_CLUSTER_HOSTFILE=", "VHPC_CLUSTER_MACHINEFILE="};
    char entry[PATH_MAX + 64];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        execspec_drop_env(spec, names[i]);
    if (a->cluster == NULL)
        return 0;
    (void)snprintf(entry, sizeof entry, "VHPC_CLUSTER_NAME=%s", a->cluster->name);
    int rc = execspec_add_env(spec, entry);
    (void)snprintf(entry, sizeof entry, "VHPC_CLUSTER_JOB=%u", a->cluster->job);
    rc = rc < 0 ? rc : execspec_add_env(spec, entry);
    if (rc < 0 || a->cluster_folder == NULL)
        return rc;
    (void)snprintf(entry, sizeof entry, "VHPC_CLUSTER_HOSTFILE=%s/hostfile", a->cluster_folder);
    rc = execspec_add_env(spec, entry);
    (void)snprintf(entry, sizeof entry, "VHPC_CLUSTER_MACHINEFILE=%s/machinefile",
                   a->cluster_folder);
    return rc < 0 ? rc : execspec_add_env(spec, entry);
}

void cluster_free(struct cluster_want *want)
{
    buf_free(&want->hosts);
    buf_free(&want->slots);
    buf_free(&want->machines);
    buf_free(&want->list);
    buf_free(&want->members);
    buf_free(&want->names);
    buf_free(&want->host_keys.lines);
    buf_free(&want->user_keys.lines);
}

void cluster_forget(struct agent *a)
{
    if (a->cluster != NULL)
        free(a->cluster->hosts);
    free(a->cluster);
    a->cluster = NULL;
}
