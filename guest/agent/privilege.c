/* SPDX-License-Identifier: Apache-2.0 */
/* Between fork and exec of a session's program: the same steps as slurmstepd, in the same order. */
#include <errno.h>
#include <grp.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "accounting.h"
#include "agent.h"
#include "memory.h"
#include "tlv.h"
#include "tmpdir.h"

static int set_identity(const struct execspec *spec)
{
    if (geteuid() != 0)
        /* An agent that is not root (a test) can run programs only with its own uid. */
        return spec->uid == geteuid() ? 0 : EPERM;
    gid_t *groups = calloc(spec->group_count + 1, sizeof *groups);
    if (groups == NULL)
        return ENOMEM;
    for (size_t i = 0; i < spec->group_count; i++)
        groups[i] = spec->groups[i];
    int rc = setgroups(spec->group_count, groups) < 0 ? errno : 0;
    free(groups);
    if (rc == 0 && setresgid(spec->gid, spec->gid, spec->gid) < 0)
        rc = errno;
    if (rc == 0 && setresuid(spec->uid, spec->uid, spec->uid) < 0)
        rc = errno;
    return rc;
}

/*
 * Programs that use verbs lock the memory that they register with an adapter. A guest's memory is
 * the job's own, so a limit of the node or of the submitting shell protects no other job here.
 */
static void unlimit_locked_memory(void)
{
    const struct rlimit unlimited = {RLIM_INFINITY, RLIM_INFINITY};
    (void)setrlimit(RLIMIT_MEMLOCK, &unlimited);
}

static int prepare(const struct execspec *spec, void *arg, struct child_report *report)
{
    struct session *s = arg;
    bool inside = s->task.in_cgroup || !s->cgroup_made;
    int rc = inside ? 0 : -cgroup_enter(s->agent, s->number);
    if (rc != 0) {
        (void)snprintf(report->text, sizeof report->text, "couldn't enter the session's cgroup: %s",
                       strerror(rc));
        return rc;
    }
    rc = -pmi_place(s);
    if (rc != 0) {
        (void)snprintf(report->text, sizeof report->text, "couldn't set up PMI_FD: %s",
                       strerror(rc));
        return rc;
    }
    /* The kernel ignores CPUs that the guest does not have. */
    if (spec->affinity_len > 0 &&
        syscall(SYS_sched_setaffinity, 0, spec->affinity_len,
                (const unsigned long *)(const void *)spec->affinity) < 0) {
        rc = errno;
        (void)snprintf(report->text, sizeof report->text, "couldn't bind to the task's CPUs: %s",
                       strerror(rc));
        return rc;
    }
    child_limits(spec);
    unlimit_locked_memory();
    if (s->agent->system) {
        memory_score(MEMORY_PROGRAM);
        tmpdir_make(spec);
    }
    rc = set_identity(spec);
    if (rc != 0) {
        (void)snprintf(report->text, sizeof report->text, "couldn't become uid %u: %s", spec->uid,
                       strerror(rc));
        return rc;
    }
    (void)umask((mode_t)(spec->has_umask ? spec->umask & 0777 : 022));
    if (s->starts_there && chdir(spec->cwd) < 0) {
        rc = errno;
        (void)snprintf(report->text, sizeof report->text, "couldn't start in %.200s: %s", spec->cwd,
                       strerror(rc));
        return rc;
    }
    child_chdir(spec, "vhpc-agent");
    return -tmpdir_check(&s->spec);
}

/*
 * slurmstepd passes programs their full name as argv[0]: a name that begins with a dot is below the
 * working directory; any other name is the first such file in PATH.
 */
static void complete_name(char **name, const char *path)
{
    static char full[2 * PATH_MAX];
    char cwd[PATH_MAX];
    struct stat st;
    if ((*name)[0] == '.' && getcwd(cwd, sizeof cwd) != NULL) {
        (void)snprintf(full, sizeof full, "%s/%s", cwd, *name);
        *name = full;
        return;
    }
    if ((*name)[0] == '/' || (*name)[0] == '.' || (*name)[0] == '\0')
        return;
    for (const char *p = path; *p != '\0'; p += strspn(p, ":")) {
        size_t len = strcspn(p, ":");
        int n = snprintf(full, sizeof full, "%.*s/%s", (int)len, p, *name);
        if (n > 0 && (size_t)n < sizeof full && stat(full, &st) == 0 && !S_ISDIR(st.st_mode)) {
            *name = full;
            return;
        }
        p += len;
    }
}

static int execute(const struct execspec *spec, void *arg, struct child_report *report)
{
    const char *path = execspec_getenv(spec, "PATH");
    (void)arg;
    complete_name(&spec->argv[0], path != NULL ? path : "");
    return child_execve(spec->argv[0], path, spec->argv, spec->envp, report);
}

static int open_cgroup(const struct task *t)
{
    const struct session *s = t->arg;
    return s->cgroup_made ? cgroup_open(s->agent, s->number) : -1;
}

static void kill_rest(struct task *t)
{
    const struct session *s = t->arg;
    cgroup_kill(s->agent, s->number, t->pid);
}

static void started_fields(struct task *t, struct buf *b)
{
    const struct session *s = t->arg;
    const struct buf told = s->pmi.record.kept;
    if (told.len > 0) /* the program is attached */
        (void)tlv_put(b, TAG_PMI_TOLD, buf_head(&told), told.len);
    if (s->pmi.judged)
        (void)tlv_put_u32(b, TAG_PMI_REFUSAL, 1);
    if (s->spec.x11.wanted)
        (void)tlv_put_u32(b, TAG_DISPLAY, (uint32_t)s->x11_error);
    /* Only MPI steps read it, and a hypervisor has to answer CPUID. */
    if (told.len == 0 && (s->spec.pmix || s->pmi.number > 0) && is_emulated())
        (void)tlv_put_u32(b, TAG_EMULATED, 1);
}

const struct task_ops session_ops = {
    .child = {.prepare = prepare, .execute = execute},
    .kill_rest = kill_rest,
    .open_cgroup = open_cgroup,
    .started_fields = started_fields,
    .exit_fields = accounting_exit_fields,
    .signal = session_signal,
    .signal_group = session_signal_group,
    .abort_signal = SIGKILL,
};
