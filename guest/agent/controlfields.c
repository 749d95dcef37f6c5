/* SPDX-License-Identifier: Apache-2.0 */
#include "controlfields.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"

enum { LIST_MAX = 65536 };

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

static int parse_network_field(const struct tlv *t, struct control_fields *r)
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
    case TAG_CLUSTER:
        return tlv_str_into(t, r->cluster.name, sizeof r->cluster.name);
    case TAG_JOB:
        return tlv_u32(t, &r->cluster.job);
    case TAG_GUEST:
        return cluster_add_guest(&r->cluster, t);
    case TAG_MEMBER_HOST_KEY:
        return cluster_add_key(&r->cluster.host_keys, SSH_HOST_ALIAS " ", t);
    case TAG_MEMBER_USER_KEY:
        return cluster_add_key(&r->cluster.user_keys, "", t);
    default:
        return 0;
    }
}

static int add_variable(struct buf *list, const struct tlv *t)
{
    int rc = buf_append(list, t->data, t->len);
    return rc < 0 ? rc : buf_append(list, "", 1);
}

int control_field(const struct tlv *t, struct control_fields *r)
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

void control_free(struct control_fields *r)
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
    cluster_free(&r->cluster);
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
