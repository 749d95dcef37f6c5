/* SPDX-License-Identifier: Apache-2.0 */
#include "accounting.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "agent.h"
#include "tlv.h"

static const uint16_t tags[USAGE_FIGURES] = {
    [USAGE_CPU] = TAG_CPU_US,
    [USAGE_USER] = TAG_USER_US,
    [USAGE_SYSTEM] = TAG_SYSTEM_US,
    [USAGE_PEAK] = TAG_PEAK_BYTES,
    [USAGE_RSS] = TAG_RSS_BYTES,
    [USAGE_READ] = TAG_READ_BYTES,
    [USAGE_WRITTEN] = TAG_WRITTEN_BYTES,
    [USAGE_OOM] = TAG_OOM_KILLS,
};

void accounting_of_session(const struct session *s, struct usage *u)
{
    char folder[4096];
    *u = (struct usage){0};
    if (s->cgroup_made) {
        cgroup_path(s->agent, s->number, folder, sizeof folder);
        usage_read(folder, u);
    }
    if (s->max_rss > 0)
        usage_set(u, USAGE_RSS, s->max_rss);
}

void accounting_count(struct session *s, const struct usage *u)
{
    if (s->counted)
        return;
    s->counted = true;
    usage_add(usage_step(&s->agent->usage, s->spec.step), u);
}

void accounting_exit_fields(struct task *t, struct buf *b)
{
    const struct session *s = t->arg;
    struct step_usage *step = usage_step(&s->agent->usage, s->spec.step);
    struct usage u;
    accounting_of_session(s, &u);
    if (step->oom_told || u.value[USAGE_OOM] == 0)
        return;
    step->oom_told = true;
    (void)tlv_put_u64(b, TAG_OOM_KILLS, u.value[USAGE_OOM]);
    (void)tlv_put_u64(b, TAG_MEMORY_KIB, s->agent->memory_mib * 1024);
}

/* --- the reply -------------------------------------------------------------------- */

/* One USAGE field; name NULL: of the whole guest. */
static int put_row(struct buf *b, const char *name, const struct usage *u, uint32_t tasks)
{
    struct buf row = {0};
    int rc = name != NULL ? tlv_put_str(&row, TAG_STEP, name) : 0;
    if (rc == 0 && tasks > 0)
        rc = tlv_put_u32(&row, TAG_TASKS, tasks);
    for (size_t i = 0; i < USAGE_FIGURES && rc == 0; i++)
        if (u->has & 1u << i)
            rc = tlv_put_u64(&row, tags[i], u->value[i]);
    if (rc == 0)
        rc = tlv_put(b, TAG_USAGE, buf_head(&row), row.len);
    buf_free(&row);
    return rc;
}

static int put_table(const struct agent *a, struct buf *b)
{
    int rc = 0;
    struct usage_table *now = malloc(sizeof *now);
    if (now == NULL)
        return -ENOMEM;
    *now = a->usage;
    for (const struct session *s = a->sessions; s != NULL; s = s->next) {
        struct usage u;
        if (!s->started || s->counted)
            continue;
        accounting_of_session(s, &u);
        usage_add(usage_step(now, s->spec.step), &u);
    }
    for (size_t i = 0; i < now->count && rc == 0; i++)
        if (now->step[i].tasks > 0)
            rc = put_row(b, now->step[i].name, &now->step[i].usage, now->step[i].tasks);
    free(now);
    return rc;
}

int accounting_put(const struct agent *a, struct buf *b)
{
    struct sysinfo info;
    struct usage u;
    char folder[4096];
    int rc = 0;
    if (sysinfo(&info) == 0)
        rc = tlv_put_u64(b, TAG_MEMORY_KIB, (uint64_t)info.totalram * info.mem_unit / 1024);
    if (rc == 0 && a->cgroup != NULL) {
        usage_read(a->cgroup, &u);
        rc = put_row(b, NULL, &u, 0);
    }
    if (rc == 0)
        rc = put_table(a, b);
    if (rc == 0)
        rc = gpus_put(&a->gpus, b);
    if (rc < 0 || a->cgroup == NULL)
        return rc;
    cgroup_login_path(a, folder, sizeof folder);
    if (access(folder, F_OK) < 0)
        return 0;
    usage_read(folder, &u);
    return put_row(b, USAGE_SSH, &u, 0);
}
