/* SPDX-License-Identifier: Apache-2.0 */
#include "hostfile.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "frame.h"

bool hostfile_is_name(const uint8_t *name, size_t len)
{
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.-";
    if (len == 0 || len > HOSTFILE_NAME_MAX || name[0] == '-')
        return false;
    for (size_t i = 0; i < len; i++)
        if (name[i] == '\0' || strchr(allowed, name[i]) == NULL)
            return false;
    return true;
}

static int add_line(struct buf *b, const char *format, const char *name, uint32_t slots)
{
    char line[HOSTFILE_NAME_MAX + 32];
    int n = strcmp(format, ":") == 0 ? snprintf(line, sizeof line, "%s:%u\n", name, slots)
                                     : snprintf(line, sizeof line, "%s slots=%u\n", name, slots);
    return n < 0 ? -EPROTO : buf_append(b, line, (size_t)n);
}

int hostfile_add(struct hostfile *h, const struct tlv *t)
{
    char name[HOSTFILE_NAME_MAX + 1];
    uint32_t slots = t->len > 4 ? get_le32(t->data) : 0;
    if (slots == 0 || slots > HOSTFILE_SLOTS_MAX || h->count == HOSTFILE_HOSTS_MAX ||
        !hostfile_is_name(t->data + 4, t->len - 4))
        return -EPROTO;
    (void)snprintf(name, sizeof name, "%.*s", (int)(t->len - 4), (const char *)t->data + 4);
    int rc = add_line(&h->slots, " ", name, slots);
    rc = rc < 0 ? rc : add_line(&h->machines, ":", name, slots);
    rc = rc < 0 || h->count == 0 ? rc : buf_append(&h->names, " ", 1);
    rc = rc < 0 ? rc : buf_append(&h->names, name, strlen(name));
    h->count += rc == 0 ? 1 : 0;
    return rc;
}

static int write_one(struct buf *b, const char *path, char *text, size_t size)
{
    int rc = buf_append(b, "", 1);
    rc = rc < 0 ? rc : write_file(path, 0644, (const char *)buf_head(b));
    if (rc < 0)
        (void)snprintf(text, size, "%s: %s", path, strerror(-rc));
    return rc;
}

int hostfile_write(struct hostfile *h, const char *slots_path, const char *machines_path,
                   char *text, size_t size)
{
    int rc = write_one(&h->slots, slots_path, text, size);
    return rc < 0 ? rc : write_one(&h->machines, machines_path, text, size);
}

int hostfile_apply(struct agent *a, struct hostfile *h, char *text, size_t size)
{
    if (h->count == 0)
        return 0;
    int rc = a->system ? hostfile_write(h, VHPC_HOSTFILE, VHPC_MACHINEFILE, text, size) : 0;
    char *names = rc < 0 ? NULL : strndup((const char *)buf_head(&h->names), h->names.len);
    if (names == NULL)
        return rc < 0 ? rc : -ENOMEM;
    free(a->host_names);
    a->host_names = names;
    return 0;
}

int hostfile_environment(const struct agent *a, struct execspec *spec)
{
    int rc = 0;
    if (a->host_names == NULL)
        return 0;
    execspec_drop_env(spec, "VHPC_HOSTFILE=");
    execspec_drop_env(spec, "VHPC_MACHINEFILE=");
    rc = execspec_add_env(spec, "VHPC_HOSTFILE=" VHPC_HOSTFILE);
    return rc < 0 ? rc : execspec_add_env(spec, "VHPC_MACHINEFILE=" VHPC_MACHINEFILE);
}

void hostfile_free(struct hostfile *h)
{
    buf_free(&h->slots);
    buf_free(&h->machines);
    buf_free(&h->names);
    h->count = 0;
}
