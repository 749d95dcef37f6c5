/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vhpc-confine: becomes a helper process that runs with a user's ids but that the user's other
 * processes cannot control.  The order of its steps is in main.c.
 */
#ifndef VHPC_CONFINE_H
#define VHPC_CONFINE_H

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/resource.h>
#include <sys/types.h>

enum {
    CONFINE_GROUPS_MAX = 1024,
    CONFINE_CGROUPS_MAX = 16,
    CONFINE_LIMITS_MAX = 8,
    CONFINE_REFUSED_MAX = 32,
};

/* Exit codes; the report descriptor has the same result as text. */
enum confine_exit {
    CONFINE_FAILED = 1, /* an error of this node */
    CONFINE_USAGE = 2,
    CONFINE_ABSENT = 3,  /* the user cannot enter the shared directory */
    CONFINE_REFUSED = 4, /* the shared directory may not be seen by guests */
};

struct confine_limit {
    int resource; /* RLIMIT_* */
    rlim_t value; /* soft and hard */
};

struct confine {
    uid_t uid;
    gid_t gid;
    gid_t groups[CONFINE_GROUPS_MAX];
    size_t group_count;
    int cgroups[CONFINE_CGROUPS_MAX]; /* open for writing: cgroup.procs of each hierarchy */
    size_t cgroup_count;
    struct confine_limit limits[CONFINE_LIMITS_MAX];
    size_t limit_count;
    cpu_set_t *cpus; /* NULL: as inherited */
    size_t cpus_size;
    const char *share; /* directory that becomes /share; NULL: the process keeps the host's root */
    bool read_only;
    const char *refused[CONFINE_REFUSED_MAX]; /* directories that may not be shared */
    size_t refused_count;
    int report; /* descriptor for the outcome; -1: only stderr */
    char **command;
};

/*
 * Parse the command line into *c.  Returns 0, or an exit code after a message on stderr; *done is
 * set if there is nothing else to do (--help).
 */
int confine_parse(struct confine *c, int argc, char **argv, bool *done);

/*
 * Write one line, KEYWORD TEXT, to the report descriptor, and TEXT to stderr
 * for a failure.  Returns code.
 */
__attribute__((format(printf, 4, 5))) int
confine_report(const struct confine *c, int code, const char *keyword, const char *format, ...);

/* Join the cgroups, set CPU affinity and limits. */
int confine_resources(const struct confine *c);

/*
 * Open the shared directory with the user's rights, in this process's mount
 * namespace.  Returns a descriptor (O_PATH), or -1 with *code set and the cause
 * reported.
 */
int confine_open_share(const struct confine *c, int *code);

/*
 * Check whether the directory that was opened may be shared: 0, or an exit code after a report.
 * With `say`, its path is reported as well.
 */
int confine_check_share(const struct confine *c, int share, bool say);

/*
 * Give this process a mount namespace whose root contains the system's programs (read-only), a
 * /proc that shows only this process, and the shared directory as /share; nothing else of the host.
 */
int confine_enter_root(const struct confine *c);

/* Use the user's file system ids, without root's capabilities over files; and back. */
void confine_as_user(const struct confine *c);
void confine_as_root(void);

/*
 * Enter a user namespace that root owns, in which all ids are the same as outside, and become the
 * user, without any capability.  Must be called in the mount namespace and root of the host when
 * `writer` was started there.
 */
int confine_start_writer(void);
int confine_become_user(const struct confine *c, int writer);

#endif
