/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One cgroup v2 per session: so all processes of the session are known and can be killed, also
 * those that it forks. If the guest has no cgroup v2, the agent uses VHPC_SESSION in the
 * environment of a process and its Unix session id. A program can leave these on purpose, but it
 * stays in its own guest.
 */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <mntent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"
#include "file.h"

enum { KILL_ROUNDS = 64, NESTED = 16 };

/* The "0::" line of /proc/PID/cgroup: the path within the v2 hierarchy. */
static bool read_own_path(pid_t pid, char *out, size_t size)
{
    char path[64], line[4096];
    bool found = false;
    (void)snprintf(path, sizeof path, "/proc/%d/cgroup", (int)pid);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return false;
    while (!found && fgets(line, sizeof line, f) != NULL) {
        if (strncmp(line, "0::", 3) != 0)
            continue;
        line[strcspn(line, "\n")] = '\0';
        found = (size_t)snprintf(out, size, "%s", line + 3) < size;
    }
    (void)fclose(f);
    return found;
}

static bool find_mount(char *out, size_t size)
{
    bool found = false;
    FILE *f = setmntent("/proc/self/mounts", "re");
    if (f == NULL)
        return false;
    for (struct mntent *m; !found && (m = getmntent(f)) != NULL;)
        if (strcmp(m->mnt_type, "cgroup2") == 0)
            found = (size_t)snprintf(out, size, "%s", m->mnt_dir) < size;
    (void)endmntent(f);
    return found;
}

/*
 * Memory and I/O are measured in cgroups whose parent has these controllers; one that the kernel
 * lacks stays off. CPU time needs none: the controller cpu would change how CPUs are shared.
 */
static void measure_children(const char *folder)
{
    char path[4096];
    (void)snprintf(path, sizeof path, "%s/cgroup.subtree_control", folder);
    (void)write_existing(path, "+memory");
    (void)write_existing(path, "+io");
}

/*
 * The same for the cgroup above ours. Only the root of all cgroups may have processes and such
 * children: elsewhere this process moves into a child.
 */
static void prepare_parent(const char *mount, const char *own, bool move)
{
    char parent[3072], path[3200];
    (void)snprintf(parent, sizeof parent, "%s%s", mount, own);
    (void)snprintf(path, sizeof path, "%s/agent", parent);
    if (move && own[0] != '\0' && (mkdir(path, 0755) == 0 || errno == EEXIST)) {
        (void)snprintf(path, sizeof path, "%s/agent/cgroup.procs", parent);
        (void)write_existing(path, "0");
    }
    measure_children(parent);
}

void cgroup_init(struct agent *a)
{
    char mount[1024], own[2048];
    if (!find_mount(mount, sizeof mount) || !read_own_path(getpid(), own, sizeof own))
        return;
    /* Below our own cgroup: for a systemd unit, this is the one that is delegated to us. */
    if (asprintf(&a->cgroup, "%s%s/vhpc.%d", mount, strcmp(own, "/") == 0 ? "" : own,
                 (int)getpid()) < 0)
        a->cgroup = NULL;
    if (a->cgroup == NULL || (mkdir(a->cgroup, 0755) < 0 && errno != EEXIST)) {
        free(a->cgroup);
        a->cgroup = NULL;
        return;
    }
    if (a->system)
        prepare_parent(mount, strcmp(own, "/") == 0 ? "" : own, !a->is_init);
    measure_children(a->cgroup);
}

static void session_path(const struct agent *a, uint32_t session, const char *file, char *out,
                         size_t size)
{
    (void)snprintf(out, size, "%s/s%u%s", a->cgroup, session, file);
}

void cgroup_path(const struct agent *a, uint32_t session, char *out, size_t size)
{
    session_path(a, session, "", out, size);
}

void cgroup_login_path(const struct agent *a, char *out, size_t size)
{
    (void)snprintf(out, size, "%s/login", a->cgroup);
}

void cgroup_enter_login(const struct agent *a)
{
    char path[4096], procs[4128];
    if (a->cgroup == NULL)
        return;
    cgroup_login_path(a, path, sizeof path);
    (void)mkdir(path, 0755);
    (void)snprintf(procs, sizeof procs, "%s/cgroup.procs", path);
    (void)write_existing(procs, "0");
}

void cgroup_end(struct agent *a)
{
    char path[4096];
    if (a->cgroup == NULL)
        return;
    cgroup_login_path(a, path, sizeof path);
    (void)rmdir(path);
    (void)rmdir(a->cgroup);
}

/*
 * Give the cgroup to a user, for container engines (admin-guide/cgroup-v2.rst, "Model of
 * Delegation"): what is moved below it stays in the session.
 */
static void delegate(const struct agent *a, uint32_t session, uid_t uid, gid_t gid)
{
    static const char *const files[] = {"", "/cgroup.procs", "/cgroup.threads",
                                        "/cgroup.subtree_control"};
    char path[4096];
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        session_path(a, session, files[i], path, sizeof path);
        (void)!chown(path, uid, gid);
    }
}

int cgroup_make(const struct agent *a, uint32_t session, uid_t uid, gid_t gid)
{
    char path[4096];
    if (a->cgroup == NULL)
        return -ENOENT;
    session_path(a, session, "", path, sizeof path);
    if (mkdir(path, 0755) < 0 && errno != EEXIST)
        return -errno;
    delegate(a, session, uid, gid);
    return 0;
}

int cgroup_open(const struct agent *a, uint32_t session)
{
    char path[4096];
    session_path(a, session, "", path, sizeof path);
    return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

int cgroup_enter(const struct agent *a, uint32_t session)
{
    char path[4096];
    session_path(a, session, "/cgroup.procs", path, sizeof path);
    return write_existing(path, "0");
}

int cgroup_freeze(const struct agent *a, uint32_t session, bool frozen)
{
    char path[4096];
    session_path(a, session, "/cgroup.freeze", path, sizeof path);
    return write_existing(path, frozen ? "1" : "0");
}

int cgroup_freeze_login(const struct agent *a, bool frozen)
{
    char path[4096], file[4128];
    cgroup_login_path(a, path, sizeof path);
    if (frozen && mkdir(path, 0755) < 0 && errno != EEXIST)
        return -errno;
    (void)snprintf(file, sizeof file, "%s/cgroup.freeze", path);
    return write_existing(file, frozen ? "1" : "0");
}

bool cgroup_is_frozen(const struct agent *a, uint32_t session)
{
    char path[4096], file[4128], line[64];
    bool frozen = false;
    if (session == 0)
        cgroup_login_path(a, path, sizeof path);
    else
        cgroup_path(a, session, path, sizeof path);
    (void)snprintf(file, sizeof file, "%s/cgroup.events", path);
    FILE *f = fopen(file, "re");
    if (f == NULL)
        return false;
    while (fgets(line, sizeof line, f) != NULL)
        frozen = frozen || strcmp(line, "frozen 1\n") == 0;
    (void)fclose(f);
    return frozen;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st;
    (void)at;
    return type == FTW_DP && rmdir(path) < 0 && errno != ENOENT ? errno : 0;
}

int cgroup_remove(const struct agent *a, uint32_t session)
{
    char path[4096];
    session_path(a, session, "", path, sizeof path);
    if (rmdir(path) == 0 || errno == ENOENT)
        return 0;
    /* with those that its programs have made below it */
    int rc = nftw(path, remove_entry, NESTED, FTW_DEPTH | FTW_PHYS);
    return rc < 0 ? -errno : -rc;
}

/* The session in "VHPC_SESSION=ID.AGENT" when AGENT is this one; else 0. */
static uint32_t session_variable(const char *entry)
{
    static const char name[] = "VHPC_SESSION=";
    char *end;
    if (strncmp(entry, name, sizeof name - 1) != 0)
        return 0;
    unsigned long id = strtoul(entry + sizeof name - 1, &end, 10);
    if (*end != '.' || id > UINT32_MAX)
        return 0;
    return strtol(end + 1, NULL, 10) == (long)getpid() ? (uint32_t)id : 0;
}

/* VHPC_SESSION of a process, from the environment it was started with; 0 = none, or another
 * agent's. */
static uint32_t environ_session(pid_t pid)
{
    char path[64];
    char *line = NULL;
    size_t size = 0;
    uint32_t session = 0;
    (void)snprintf(path, sizeof path, "/proc/%d/environ", (int)pid);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return 0;
    while (session == 0 && getdelim(&line, &size, '\0', f) > 0)
        session = session_variable(line);
    free(line);
    (void)fclose(f);
    return session;
}

uint32_t cgroup_session_of(const struct agent *a, pid_t pid)
{
    char own[2048];
    const char *base = a->cgroup != NULL ? strrchr(a->cgroup, '/') : NULL;
    if (base != NULL && read_own_path(pid, own, sizeof own)) {
        const char *at = strstr(own, base);
        if (at != NULL && strncmp(at + strlen(base), "/s", 2) == 0)
            return (uint32_t)strtoul(at + strlen(base) + 2, NULL, 10);
    }
    return environ_session(pid);
}

void cgroup_signal(const struct agent *a, uint32_t session, pid_t leader, int number)
{
    DIR *proc = opendir("/proc");
    if (proc == NULL)
        return;
    for (struct dirent *e; (e = readdir(proc)) != NULL;) {
        pid_t pid = isdigit((unsigned char)e->d_name[0]) ? (pid_t)strtol(e->d_name, NULL, 10) : 0;
        if (pid > 1 && pid != leader && getpgid(pid) == leader &&
            cgroup_session_of(a, pid) == session)
            (void)kill(pid, number);
    }
    (void)closedir(proc);
}

static bool kill_by_search(uint32_t session, pid_t leader)
{
    bool any = false;
    DIR *proc = opendir("/proc");
    if (proc == NULL)
        return false;
    for (struct dirent *e; (e = readdir(proc)) != NULL;) {
        pid_t pid = isdigit((unsigned char)e->d_name[0]) ? (pid_t)strtol(e->d_name, NULL, 10) : 0;
        if (pid <= 1 || pid == getpid())
            continue;
        if ((leader > 0 && getsid(pid) == leader) || environ_session(pid) == session)
            any = kill(pid, SIGKILL) == 0 || any;
    }
    (void)closedir(proc);
    return any;
}

void cgroup_kill(const struct agent *a, uint32_t session, pid_t leader)
{
    char path[4096];
    if (a->cgroup != NULL) {
        session_path(a, session, "/cgroup.kill", path, sizeof path);
        if (write_existing(path, "1") == 0)
            return;
    }
    /*
     * Without cgroup.kill (Linux < 5.14): repeat while processes are found, because they may fork
     * meanwhile.
     */
    for (int i = 0; i < KILL_ROUNDS && kill_by_search(session, leader); i++)
        ;
}
