/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: Variables of the agent are listed */
#include "fabric.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent.h"
#include "defaults.h"
#include "reply.h"
#include "tlv.h"

enum { CHECK_MS = 200 };

#define MARK "VHPC_FABRIC"

enum variable { PKEY, UCX_PKEY, OMPI_PKEY, UCX_DEVICES, NCCL_DEVICES, NCCL_PKEY };

static const char *const names[FABRIC_VARIABLES] = {
    [PKEY] = "VHPC_PKEY",
    [UCX_PKEY] = "UCX_IB_PKEY",
    [OMPI_PKEY] = "OMPI_MCA_btl_openib_pkey",
    [UCX_DEVICES] = "UCX_NET_DEVICES",
    [NCCL_DEVICES] = "NCCL_IB_HCA",
    [NCCL_PKEY] = "NCCL_IB_PKEY",
};

/* mlx5_0:1,mlx5_1:1 after prefix; to be freed. */
static char *device_list(const struct ib_found *found, const char *prefix)
{
    size_t size = strlen(prefix) + found->count * (IB_DEVICE_MAX + 12) + 1, used;
    char *list = malloc(size);
    if (list == NULL)
        return NULL;
    used = (size_t)snprintf(list, size, "%s", prefix);
    for (size_t i = 0; i < found->count; i++)
        used += (size_t)snprintf(list + used, size - used, "%s%s:%u", i > 0 ? "," : "",
                                 found->port[i].device, found->port[i].number);
    return list;
}

static char *key_text(uint16_t entry)
{
    char text[16];
    (void)snprintf(text, sizeof text, "0x%04x", entry & ~(unsigned)IB_PKEY_FULL);
    return strdup(text);
}

static char *index_text(unsigned index)
{
    char text[16];
    (void)snprintf(text, sizeof text, "%u", index);
    return strdup(text);
}

int fabric_name(struct fabric *f)
{
    bool same = f->found.count > 0;
    for (size_t i = 0; i < FABRIC_VARIABLES; i++)
        free(f->value[i]);
    for (size_t i = 1; i < f->found.count; i++)
        same = same && f->found.port[i].index == f->found.port[0].index;
    f->value[PKEY] = key_text(f->want.key[0]);
    f->value[UCX_PKEY] = key_text(f->want.key[0]);
    f->value[OMPI_PKEY] = key_text(f->want.key[0]);
    f->value[UCX_DEVICES] = device_list(&f->found, "");
    f->value[NCCL_DEVICES] = device_list(&f->found, "="); /* '=': these names, not prefixes */
    /* One index for all ports: NCCL has no way to set different ones. */
    f->value[NCCL_PKEY] = same ? index_text(f->found.port[0].index) : NULL;
    for (size_t i = 0; i < NCCL_PKEY; i++)
        if (f->value[i] == NULL)
            return -ENOMEM;
    return same && f->value[NCCL_PKEY] == NULL ? -ENOMEM : 0;
}

void fabric_free(struct fabric *f)
{
    if (f == NULL)
        return;
    for (size_t i = 0; i < FABRIC_VARIABLES; i++)
        free(f->value[i]);
    free(f);
}

int fabric_environment(const struct fabric *f, struct execspec *spec)
{
    struct default_value list[FABRIC_VARIABLES];
    for (size_t i = 0; i < FABRIC_VARIABLES; i++)
        list[i] = (struct default_value){names[i], f->value[i], i == PKEY};
    return defaults_apply(spec, MARK, list, FABRIC_VARIABLES);
}

int fabric_ask(struct session *s, uint32_t request, const struct ib_want *want, uint32_t wait_ms,
               char *text, size_t size)
{
    struct agent *a = s->agent;
    uint32_t address, mask;
    if (want->guid_count == 0 || want->key_count == 0 || wait_ms > FABRIC_WAIT_MAX_MS) {
        (void)snprintf(text, size,
                       "the request needs PORT_GUID, KEY, and WAIT_MS of at most 600000");
        return -EINVAL;
    }
    if (want->address[0] != '\0' && ipoib_parse(want->address, &address, &mask) < 0) {
        (void)snprintf(text, size, "ADDRESS is not A.B.C.D/N");
        return -EINVAL;
    }
    if (a->fabric != NULL && a->fabric->waiting) {
        (void)snprintf(text, size, "another fabric request is still waiting for the ports");
        return -EBUSY;
    }
    fabric_free(a->fabric);
    a->fabric = calloc(1, sizeof *a->fabric);
    if (a->fabric == NULL)
        return -ENOMEM;
    a->fabric->want = *want;
    a->fabric->waiting = true;
    a->fabric->session = s->id;
    a->fabric->request = request;
    a->fabric->until = now_ms() + wait_ms;
    return 0;
}

static void give_up(struct agent *a)
{
    fabric_free(a->fabric);
    a->fabric = NULL;
}

void fabric_forget(struct agent *a, const struct session *s)
{
    if (a->fabric != NULL && a->fabric->waiting && a->fabric->session == s->id)
        give_up(a);
}

static int put_ports(const struct fabric *f, struct buf *b)
{
    uint8_t raw[4 + IB_DEVICE_MAX + 12];
    int rc = 0;
    for (size_t i = 0; i < f->found.count && rc == 0; i++) {
        const struct ib_port *p = &f->found.port[i];
        put_le32(raw, p->index);
        int n = snprintf((char *)raw + 4, sizeof raw - 4, "%s:%u", p->device, p->number);
        rc = tlv_put(b, TAG_PORT, raw, 4 + (size_t)n);
    }
    if (rc == 0 && f->interface[0] != '\0')
        rc = tlv_put_str(b, TAG_INTERFACE, f->interface);
    return rc;
}

/* Whether all ports are as wanted; if not, text describes the deviations. */
static bool ports_ready(const struct agent *a, struct fabric *f, char *text, size_t size)
{
    uint32_t address, mask;
    if (!ib_check(a->sysfs, &f->want, &f->found, text, size))
        return false;
    if (f->want.address[0] == '\0')
        return true;
    if (ipoib_parse(f->want.address, &address, &mask) < 0 ||
        ipoib_interface(a->sysfs, &f->found.port[0], f->want.key[0], f->interface, text, size) == 0)
        return false;
    return !a->system || ipoib_bring_up(f->interface, address, mask, text, size) == 0;
}

int fabric_tick(struct agent *a, long long now, bool *work)
{
    struct fabric *f = a->fabric;
    struct buf b = {0};
    char text[1024];
    if (f == NULL || !f->waiting)
        return 0;
    *work = true;
    if (now < f->next)
        return 0;
    f->next = now + CHECK_MS;
    bool good = ports_ready(a, f, text, sizeof text);
    if (!good && now < f->until)
        return 0;
    f->waiting = false;
    int result = good ? fabric_name(f) : -ENODEV;
    int rc = result == 0 ? put_ports(f, &b) : 0;
    if (rc == 0)
        rc = reply_send(a, f->session, f->request, result, text, &b);
    buf_free(&b);
    if (result < 0)
        give_up(a);
    return rc;
}
