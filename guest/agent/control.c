/* SPDX-License-Identifier: Apache-2.0 */
/* REQUEST: root's operations on the whole guest. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "accounting.h"
#include "agent.h"
#include "containers.h"
#include "fabric.h"
#include "hold.h"
#include "hostfile.h"
#include "identity.h"
#include "nat.h"
#include "network.h"
#include "reach.h"
#include "reply.h"
#include "ssh.h"
#include "tlv.h"
#include "topology.h"

enum { LIST_MAX = 65536 };

struct request {
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
    struct identity who;
};

static int add_string(char ***list, size_t *count, const struct tlv *t)
{
    char *text = NULL;
    int rc = *count < LIST_MAX ? tlv_str(t, &text) : -EPROTO;
    if (rc < 0)
        return rc;
    char **grown = realloc(*list, (*count + 1) * sizeof(char *));
    if (grown == NULL) {
        free(text);
        return -ENOMEM;
    }
    *list = grown;
    (*list)[(*count)++] = text;
    return 0;
}

/* u32 gid, then the name. */
static int add_group(struct identity *who, const struct tlv *t)
{
    struct tlv name = {.tag = t->tag, .len = t->len - 4, .data = t->data + 4};
    char *text = NULL;
    int rc = t->len > 4 && who->group_count < LIST_MAX ? tlv_str(&name, &text) : -EPROTO;
    if (rc < 0)
        return rc;
    struct identity_group *grown =
        realloc(who->groups, (who->group_count + 1) * sizeof *who->groups);
    if (grown == NULL) {
        free(text);
        return -ENOMEM;
    }
    who->groups = grown;
    who->groups[who->group_count++] =
        (struct identity_group){.gid = get_le32(t->data), .name = text};
    return 0;
}

/* TAG_KEY, an entry of a pkey table, or TAG_PORT_GUID */
static int add_fabric(struct ib_want **want, const struct tlv *t)
{
    uint32_t key = 0;
    uint64_t guid = 0;
    int rc = t->tag == TAG_KEY ? tlv_u32(t, &key) : tlv_u64(t, &guid);
    if (rc < 0)
        return rc;
    if (*want == NULL)
        *want = calloc(1, sizeof **want);
    struct ib_want *w = *want;
    if (w == NULL)
        return -ENOMEM;
    if (t->tag == TAG_PORT_GUID) {
        if (guid == 0 || w->guid_count == IB_PORTS_MAX)
            return -EPROTO;
        w->guid[w->guid_count++] = guid;
        return 0;
    }
    if (key > UINT16_MAX || (key & ~(uint32_t)IB_PKEY_FULL) == 0 || w->key_count == IB_KEYS_MAX)
        return -EPROTO;
    w->key[w->key_count++] = (uint16_t)key;
    return 0;
}

static int set_address(struct ib_want **want, const struct tlv *t)
{
    if (*want == NULL)
        *want = calloc(1, sizeof **want);
    return *want == NULL ? -ENOMEM : tlv_str_into(t, (*want)->address, sizeof(*want)->address);
}

static int set_mac(struct network_want *want, const struct tlv *t)
{
    if (t->len != sizeof want->mac)
        return -EPROTO;
    memcpy(want->mac, t->data, sizeof want->mac);
    want->has_mac = true;
    return 0;
}

static int add_target(struct reach_want *want, const struct tlv *t)
{
    if (want->count == REACH_TARGETS_MAX)
        return -EPROTO;
    char *target = want->target[want->count++];
    return tlv_str_into(t, target, sizeof want->target[0]);
}

static int parse_network_field(const struct tlv *t, struct request *r)
{
    struct network_want *want = &r->network;
    switch (t->tag) {
    case TAG_MAC:
        return set_mac(want, t);
    case TAG_INTERFACE:
        return tlv_str_into(t, want->name, sizeof want->name);
    case TAG_MTU:
        return tlv_u32(t, &want->mtu);
    case TAG_IPV4:
        return tlv_str_into(t, want->ipv4, sizeof want->ipv4);
    case TAG_IPV6:
        return tlv_str_into(t, want->ipv6, sizeof want->ipv6);
    case TAG_NODELIST:
        return tlv_str(t, &r->nodelist);
    case TAG_GATEWAY:
        return tlv_str_into(t, r->nat.gateway, sizeof r->nat.gateway);
    case TAG_NAMESERVER:
        return nat_add_server(&r->nat, t);
    case TAG_TARGET:
        return add_target(&r->reach, t);
    case TAG_HOST:
        return hostfile_add(&r->hosts, t);
    case TAG_HOST_KEY:
        return tlv_str(t, &r->ssh.host_key);
    case TAG_HOST_PUBLIC:
        return tlv_str(t, &r->ssh.host_public);
    case TAG_USER_KEY:
        return tlv_str(t, &r->ssh.user_key);
    case TAG_USER_PUBLIC:
        return tlv_str(t, &r->ssh.user_public);
    default:
        return 0;
    }
}

static int add_variable(struct buf *list, const struct tlv *t)
{
    int rc = buf_append(list, t->data, t->len);
    return rc < 0 ? rc : buf_append(list, "", 1);
}

static int parse_field(const struct tlv *t, struct request *r)
{
    switch (t->tag) {
    case TAG_OP:
        return tlv_u32(t, &r->op);
    case TAG_REQUEST_ID:
        return tlv_u32(t, &r->id);
    case TAG_HOSTNAME:
        return tlv_str(t, &r->who.hostname);
    case TAG_HOSTS_LINE:
        return add_string(&r->who.hosts, &r->who.host_count, t);
    case TAG_USER_NAME:
        return tlv_str(t, &r->who.user);
    case TAG_USER_UID:
        return tlv_u32(t, &r->who.uid);
    case TAG_USER_GID:
        return tlv_u32(t, &r->who.gid);
    case TAG_USER_GECOS:
        return tlv_str(t, &r->who.gecos);
    case TAG_USER_HOME:
        return tlv_str(t, &r->who.home);
    case TAG_USER_SHELL:
        return tlv_str(t, &r->who.shell);
    case TAG_GROUP:
        return add_group(&r->who, t);
    case TAG_TIMEZONE:
        return tlv_str(t, &r->who.timezone);
    case TAG_ZONE_DATA:
        return tlv_bytes(t, &r->who.zone, &r->who.zone_len);
    case TAG_COMMAND:
        return add_string(&r->who.commands, &r->who.command_count, t);
    case TAG_MOUNT_TAG:
        return tlv_str(t, &r->mount_tag);
    case TAG_MOUNT_PATH:
        return tlv_str(t, &r->mount_path);
    case TAG_READ_ONLY:
        return tlv_u32(t, &r->read_only);
    case TAG_KEY:
    case TAG_PORT_GUID:
        return add_fabric(&r->fabric, t);
    case TAG_ADDRESS:
        return set_address(&r->fabric, t);
    case TAG_ENV:
        return add_variable(&r->environment, t);
    case TAG_CWD:
        return tlv_str(t, &r->start_dir);
    case TAG_MOUNT_SOURCE:
        return tlv_str(t, &r->mount_source);
    case TAG_WAIT_MS:
        return tlv_u32(t, &r->wait_ms);
    case TAG_TIME_NS:
    case TAG_HOLD:
        return tlv_u64(t, t->tag == TAG_HOLD ? &r->hold.serial : &r->hold.time_ns);
    case TAG_TOPOLOGY:
        return tlv_str(t, &r->topology);
    default:
        return parse_network_field(t, r);
    }
}

static void free_request(struct request *r)
{
    free(r->fabric);
    free(r->mount_tag);
    free(r->mount_path);
    free(r->mount_source);
    free(r->start_dir);
    buf_free(&r->environment);
    free(r->topology);
    free(r->nodelist);
    hostfile_free(&r->hosts);
    free(r->ssh.host_key);
    free(r->ssh.host_public);
    free(r->ssh.user_key);
    free(r->ssh.user_public);
    free(r->who.hostname);
    free(r->who.timezone);
    free(r->who.zone);
    free(r->who.user);
    free(r->who.gecos);
    free(r->who.home);
    free(r->who.shell);
    for (size_t i = 0; i < r->who.host_count; i++)
        free(r->who.hosts[i]);
    for (size_t i = 0; i < r->who.group_count; i++)
        free(r->who.groups[i].name);
    for (size_t i = 0; i < r->who.command_count; i++)
        free(r->who.commands[i]);
    free(r->who.hosts);
    free(r->who.groups);
    free(r->who.commands);
}

static int put_info(const struct agent *a, struct buf *b)
{
    struct sysinfo info;
    uint32_t running = 0;
    char host[256] = "";
    for (const struct session *s = a->sessions; s != NULL; s = s->next)
        running += s->started && !s->task.finished ? 1 : 0;
    (void)gethostname(host, sizeof host - 1);
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    int rc = tlv_put_str(b, TAG_AGENT_VERSION, a->hello.agent_version);
    rc = rc < 0 ? rc : tlv_put_str(b, TAG_BOOT_ID, a->hello.boot_id);
    rc = rc < 0 ? rc : tlv_put_str(b, TAG_KERNEL, a->hello.kernel);
    rc = rc < 0 ? rc : tlv_put_str(b, TAG_HOSTNAME, host);
    rc = rc < 0 ? rc : tlv_put_u32(b, TAG_CPUS, cpus > 0 ? (uint32_t)cpus : 0);
    rc = rc < 0 ? rc : tlv_put_u32(b, TAG_SESSIONS, running);
    rc = rc < 0 ? rc : tlv_put_u32(b, TAG_LOCKS, a->locks > 0);
    if (rc == 0 && sysinfo(&info) == 0)
        rc = tlv_put_u64(b, TAG_MEMORY_KIB, (uint64_t)info.totalram * info.mem_unit / 1024);
    return rc;
}

static int ask_reach(struct session *s, const struct request *r, char *text, size_t size,
                     bool *later)
{
    struct reach_want want = r->reach;
    want.size = r->network.mtu;
    want.wait_ms = r->wait_ms;
    int rc = reach_ask(s, r->id, &want, text, size);
    *later = rc == 0;
    return rc;
}

static int set_identity(const struct agent *a, const struct identity *id, char *text, size_t size)
{
    int rc = identity_apply(a, id, text, size);
    if (rc == 0 && a->system && id->user != NULL)
        containers_prepare(id);
    return rc;
}

/* 0 or -errno with one line in text; *later: the reply is sent later. */
static int perform(struct session *s, struct request *r, char *text, size_t size, bool *later)
{
    struct agent *a = s->agent;
    int rc;
    switch (r->op) {
    case VHPC_OP_IDENTITY:
        return set_identity(a, &r->who, text, size);
    case VHPC_OP_MOUNT:
        if (r->mount_tag == NULL || r->mount_path == NULL)
            break;
        return mount_share(a, r->mount_tag, r->mount_path, r->read_only != 0, text, size);
    case VHPC_OP_DISK:
        if (r->mount_path == NULL || r->who.uid == 0)
            break;
        return mount_disk(a, r->mount_path, r->who.uid, r->who.gid, text, size);
    case VHPC_OP_BIND:
        if (r->mount_source == NULL || r->mount_path == NULL || r->who.uid == 0)
            break;
        return bind_folder(a, &r->who, r->mount_source, r->mount_path, r->read_only != 0, text,
                           size);
    case VHPC_OP_ENVIRONMENT:
        return environment_set(a, &r->environment, r->start_dir, text, size);
    case VHPC_OP_READY:
    case VHPC_OP_INFO:
    case VHPC_OP_USAGE:
        return 0;
    case VHPC_OP_POWEROFF:
        a->powering_off = true;
        return 0;
    case VHPC_OP_FABRIC:
        if (r->fabric == NULL)
            break;
        rc = fabric_ask(s, r->id, r->fabric, r->wait_ms, text, size);
        *later = rc == 0;
        return rc;
    case VHPC_OP_TOPOLOGY:
        if (r->topology == NULL)
            break;
        return topology_set(a, r->topology, text, size);
    case VHPC_OP_NETWORK:
        rc = network_apply(a, &r->network, r->nodelist, text, size);
        return rc < 0 ? rc : hostfile_apply(a, &r->hosts, text, size);
    case VHPC_OP_NAT:
        return nat_apply(a, &r->nat, &r->network, text, size);
    case VHPC_OP_REACH:
        return ask_reach(s, r, text, size, later);
    case VHPC_OP_SSH:
        r->ssh.uid = r->who.uid;
        r->ssh.gid = r->who.gid;
        return ssh_apply(a, &r->ssh, text, size);
    default:
        r->hold.op = r->op;
        r->hold.request = r->id;
        r->hold.wait_ms = r->wait_ms;
        return hold_perform(s, &r->hold, text, size, later);
    }
    (void)snprintf(text, size, "the request has no field that this operation needs");
    return -EINVAL;
}

int control_request(struct session *s, const struct buf *message)
{
    struct tlv_reader reader = {buf_head(message), message->len};
    struct request r = {0};
    struct buf b = {0};
    struct tlv t;
    char text[512] = "";
    bool later = false;
    int rc, result;
    while ((rc = tlv_next(&reader, &t)) > 0)
        if ((rc = parse_field(&t, &r)) < 0)
            break;
    if (rc < 0) {
        result = rc;
        (void)snprintf(text, sizeof text, "malformed request");
    } else {
        result = perform(s, &r, text, sizeof text, &later);
    }
    rc = 0;
    if (result == 0 && (r.op == VHPC_OP_INFO || r.op == VHPC_OP_READY))
        rc = put_info(s->agent, &b);
    else if (result == 0 && r.op == VHPC_OP_USAGE)
        rc = accounting_put(s->agent, &b);
    if (rc == 0 && !later)
        rc = reply_send(s->agent, s->id, r.id, result, text, &b);
    buf_free(&b);
    free_request(&r);
    return rc;
}
