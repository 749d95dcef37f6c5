/* Between fork and exec of a session's program: slurmstepd's order of things. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"

static unsigned long long nr_open(void)
{
    char text[32] = "";
    int fd = open("/proc/sys/fs/nr_open", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 1048576;
    ssize_t n = read(fd, text, sizeof text - 1);
    (void)close(fd);
    return n > 0 ? strtoull(text, NULL, 10) : 1048576;
}

/* As much of the limit as this guest can give. */
static void set_limit(const struct exec_rlimit *want)
{
    struct rlimit limit = {.rlim_cur = want->soft, .rlim_max = want->hard}, now;
    __rlimit_resource_t which = (__rlimit_resource_t)want->resource;
    if (want->resource >= RLIM_NLIMITS)
        return;
    if (which == RLIMIT_NOFILE && limit.rlim_max > nr_open())
        limit.rlim_max = nr_open();
    if (limit.rlim_cur > limit.rlim_max)
        limit.rlim_cur = limit.rlim_max;
    if (setrlimit(which, &limit) == 0 || getrlimit(which, &now) < 0)
        return;
    if (limit.rlim_max > now.rlim_max)
        limit.rlim_max = now.rlim_max;
    if (limit.rlim_cur > limit.rlim_max)
        limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(which, &limit);
}

static int set_identity(const struct execspec *spec)
{
    if (geteuid() != 0)
        /* An agent that is not root (a test) can run programs as itself only. */
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

static int prepare(const struct execspec *spec, void *arg, struct child_report *report)
{
    const struct session *s = arg;
    int rc = s->cgroup_made ? -cgroup_enter(s->agent, s->id) : 0;
    if (rc != 0) {
        (void)snprintf(report->text, sizeof report->text, "couldn't enter the session's cgroup: %s",
                       strerror(rc));
        return rc;
    }
    if (spec->has_nice)
        (void)setpriority(PRIO_PROCESS, 0, spec->nice);
    for (size_t i = 0; i < spec->rlimit_count; i++)
        set_limit(&spec->rlimit[i]);
    rc = set_identity(spec);
    if (rc != 0) {
        (void)snprintf(report->text, sizeof report->text, "couldn't become uid %u: %s", spec->uid,
                       strerror(rc));
        return rc;
    }
    (void)umask((mode_t)(spec->has_umask ? spec->umask & 0777 : 022));
    child_chdir(spec, "vhpc-agent");
    return 0;
}

static int execute(const struct execspec *spec, void *arg, struct child_report *report)
{
    const char *path = execspec_getenv(spec, "PATH");
    (void)arg;
    return child_execve(spec->argv[0], path != NULL ? path : "/bin:/usr/bin", spec->argv,
                        spec->envp, report);
}

static void kill_rest(struct task *t)
{
    const struct session *s = t->arg;
    cgroup_kill(s->agent, s->id, t->pid);
}

const struct task_ops session_ops = {
    .child = {.prepare = prepare, .execute = execute},
    .kill_rest = kill_rest,
    .abort_signal = SIGKILL,
};
