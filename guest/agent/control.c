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
#include "controlfields.h"
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

static int ask_reach(struct session *s, const struct control_fields *r, char *text, size_t size,
                     bool *later)
{
    struct reach_want want = r->reach;
    want.size = r->network.mtu;
    want.wait_ms = r->wait_ms;
    int rc = reach_ask(s, r->id, &want, text, size);
    *later = rc == 0;
    return rc;
}

static int ask_hold(struct session *s, struct control_fields *r, char *text, size_t size,
                    bool *later)
{
    r->hold.op = r->op;
    r->hold.request = r->id;
    r->hold.wait_ms = r->wait_ms;
    return hold_perform(s, &r->hold, text, size, later);
}

static int set_identity(const struct agent *a, const struct identity *id, char *text, size_t size)
{
    int rc = identity_apply(a, id, text, size);
    if (rc == 0 && a->system && id->user != NULL)
        containers_prepare(id);
    return rc;
}

/* 0 or -errno with one line in text; *later: the reply is sent later. */
static int perform(struct session *s, struct control_fields *r, char *text, size_t size,
                   bool *later)
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
    case VHPC_OP_CLUSTER:
        r->cluster.uid = r->who.uid;
        return cluster_apply(a, &r->cluster, text, size);
    default:
        return ask_hold(s, r, text, size, later);
    }
    (void)snprintf(text, size, "the request has no field that this operation needs");
    return -EINVAL;
}

int control_request(struct session *s, const struct buf *message)
{
    struct tlv_reader reader = {buf_head(message), message->len};
    struct control_fields r = {0};
    struct buf b = {0};
    struct tlv t;
    char text[512] = "";
    bool later = false;
    int rc, result;
    while ((rc = tlv_next(&reader, &t)) > 0)
        if ((rc = control_field(&t, &r)) < 0)
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
    control_free(&r);
    return rc;
}
