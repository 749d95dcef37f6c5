/* REQUEST: root's operations on the guest as a whole. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"
#include "identity.h"
#include "tlv.h"

enum { LIST_MAX = 65536 };

struct request {
    uint32_t id;
    uint32_t op;
    uint32_t read_only;
    char *mount_tag;
    char *mount_path;
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
    case TAG_COMMAND:
        return add_string(&r->who.commands, &r->who.command_count, t);
    case TAG_MOUNT_TAG:
        return tlv_str(t, &r->mount_tag);
    case TAG_MOUNT_PATH:
        return tlv_str(t, &r->mount_path);
    case TAG_READ_ONLY:
        return tlv_u32(t, &r->read_only);
    default:
        return 0;
    }
}

static void free_request(struct request *r)
{
    free(r->mount_tag);
    free(r->mount_path);
    free(r->who.hostname);
    free(r->who.timezone);
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

static uint64_t uptime_ms(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
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
    if (rc == 0 && sysinfo(&info) == 0)
        rc = tlv_put_u64(b, TAG_MEMORY_KIB, (uint64_t)info.totalram * info.mem_unit / 1024);
    return rc;
}

static int perform(struct agent *a, const struct request *r, char *text, size_t size)
{
    switch (r->op) {
    case VHPC_OP_IDENTITY:
        return identity_apply(a, &r->who, text, size);
    case VHPC_OP_MOUNT:
        if (r->mount_tag == NULL || r->mount_path == NULL)
            break;
        return mount_share(a, r->mount_tag, r->mount_path, r->read_only != 0, text, size);
    case VHPC_OP_READY:
    case VHPC_OP_INFO:
        return 0;
    case VHPC_OP_POWEROFF:
        a->powering_off = true;
        return 0;
    default:
        (void)snprintf(text, size, "operation %u is unknown to this agent", r->op);
        return -ENOSYS;
    }
    (void)snprintf(text, size, "the request lacks a field");
    return -EINVAL;
}

int control_request(struct session *s, const struct buf *message)
{
    struct tlv_reader reader = {buf_head(message), message->len};
    struct request r = {0};
    struct buf b = {0};
    struct tlv t;
    char text[512] = "";
    int rc, result;
    while ((rc = tlv_next(&reader, &t)) > 0)
        if ((rc = parse_field(&t, &r)) < 0)
            break;
    if (rc < 0) {
        result = rc;
        (void)snprintf(text, sizeof text, "malformed request");
    } else {
        result = perform(s->agent, &r, text, sizeof text);
    }
    rc = tlv_put_u32(&b, TAG_REQUEST_ID, r.id);
    rc = rc < 0 ? rc : tlv_put_u32(&b, TAG_ERRNO, (uint32_t)-result);
    rc = rc < 0 ? rc : tlv_put_u64(&b, TAG_UPTIME_MS, uptime_ms());
    if (rc == 0 && text[0] != '\0')
        rc = tlv_put_str(&b, TAG_TEXT, text);
    if (rc == 0 && (r.op == VHPC_OP_INFO || r.op == VHPC_OP_READY))
        rc = put_info(s->agent, &b);
    if (rc == 0)
        rc = chan_send_message(&s->agent->host, VHPC_REPLY, s->id, 0, &b);
    buf_free(&b);
    free_request(&r);
    return rc;
}
