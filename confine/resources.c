/* SPDX-License-Identifier: Apache-2.0 */
/* Resources of the process: cgroups, CPUs, limits. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "confine.h"

static int join_cgroups(const struct confine *c)
{
    for (size_t i = 0; i < c->cgroup_count; i++) {
        if (write(c->cgroups[i], "0", 1) != 1)
            return confine_report(c, CONFINE_FAILED, "failed", "cannot join the cgroup: %s",
                                  strerror(errno));
        (void)close(c->cgroups[i]);
    }
    return 0;
}

/*
 * A core file of a daemon that maps a guest's memory is as large as the guest. RLIMIT_CORE does not
 * limit a pipe in core_pattern, so the process dumps no mappings at all: core(5), "Controlling
 * which mappings are written".
 */
static int dump_nothing(const struct confine *c)
{
    int fd = open("/proc/self/coredump_filter", O_WRONLY | O_CLOEXEC);

    if (fd < 0 && errno == ENOENT)
        return 0; /* a kernel without core files */
    ssize_t written = fd < 0 ? -1 : write(fd, "0", 1);
    int error = errno;
    if (fd >= 0)
        (void)close(fd);
    return written == 1 ? 0
                        : confine_report(c, CONFINE_FAILED, "failed",
                                         "/proc/self/coredump_filter: %s", strerror(error));
}

/* Without CAP_SYS_RESOURCE (root of a container), a limit can be set up to our own hard limit. */
static int set_limit(const struct confine *c, const struct confine_limit *wanted)
{
    __rlimit_resource_t resource = (__rlimit_resource_t)wanted->resource;
    struct rlimit limit = {.rlim_cur = wanted->value, .rlim_max = wanted->value};
    struct rlimit own;

    if (setrlimit(resource, &limit) == 0)
        return 0;
    int error = errno;
    if (error == EPERM && getrlimit(resource, &own) == 0 && own.rlim_max < wanted->value) {
        own.rlim_cur = own.rlim_max;
        if (setrlimit(resource, &own) == 0)
            return 0;
    }
    return confine_report(c, CONFINE_FAILED, "failed", "cannot set limit %d to %llu: %s",
                          wanted->resource, (unsigned long long)wanted->value, strerror(error));
}

int confine_resources(const struct confine *c)
{
    int code = join_cgroups(c);

    if (code != 0)
        return code;
    if (c->cpus != NULL && sched_setaffinity(0, c->cpus_size, c->cpus) != 0)
        return confine_report(c, CONFINE_FAILED, "failed", "cannot set the CPU affinity: %s",
                              strerror(errno));
    for (size_t i = 0; i < c->limit_count; i++) {
        code = set_limit(c, &c->limits[i]);
        if (code != 0)
            return code;
    }
    return dump_nothing(c);
}
