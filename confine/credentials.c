/* SPDX-License-Identifier: Apache-2.0 */
/* From root to the user, in a user namespace that the user does not own. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "confine.h"

/*
 * A process may trace another one, open its /proc/PID/mem, environ and fd, or take descriptors from
 * it, if it has the same ids *and* is in the same user namespace, or has CAP_SYS_PTRACE there
 * (ptrace(2), "Ptrace access mode checking").  The namespace belongs to root, who creates it, so
 * the user has no capability in it.  All ids map to themselves: files, signals and credentials on
 * sockets have the same meaning as outside.
 */
static const char identity[] = "0 0 4294967295\n";

static int write_map(pid_t pid, const char *name)
{
    char path[64];

    (void)snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t written = write(fd, identity, sizeof identity - 1);
    int error = errno;
    (void)close(fd);
    errno = error;
    return written == (ssize_t)sizeof identity - 1 ? 0 : -1;
}

/*
 * A process in the namespace cannot map ids that the namespace does not have yet. A child that
 * stays outside does so, when it gets a byte on its socket.
 */
static void writer_main(int channel, pid_t pid)
{
    char word;
    int error = 0;

    if (read(channel, &word, 1) == 1) {
        if (write_map(pid, "uid_map") != 0 || write_map(pid, "gid_map") != 0)
            error = errno;
        (void)!write(channel, &error, sizeof error);
    }
    _exit(0);
}

int confine_start_writer(void)
{
    int pair[2];
    pid_t pid = getpid();

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
        return -1;
    pid_t child = fork();
    if (child == 0) {
        (void)close(pair[0]);
        writer_main(pair[1], pid);
    }
    int error = errno;
    (void)close(pair[1]);
    if (child > 0)
        return pair[0];
    (void)close(pair[0]);
    errno = error;
    return -1;
}

static int enter_namespace(const struct confine *c, int writer)
{
    int error = 0;

    if (unshare(CLONE_NEWUSER) != 0)
        return confine_report(c, CONFINE_FAILED, "failed",
                              "cannot make a user namespace: %s (is user.max_user_namespaces 0?)",
                              strerror(errno));
    if (write(writer, "", 1) != 1 || read(writer, &error, sizeof error) != (ssize_t)sizeof error)
        error = errno != 0 ? errno : EPIPE;
    (void)close(writer);
    (void)wait(NULL);
    if (error != 0)
        return confine_report(c, CONFINE_FAILED, "failed", "cannot map ids: %s", strerror(error));
    return 0;
}

int confine_become_user(const struct confine *c, int writer)
{
    int code = enter_namespace(c, writer);

    if (code != 0)
        return code;
    /* fails after the last capability that this kernel knows */
    for (unsigned long cap = 0; prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) == 0; cap++)
        ;
    if (setresgid(c->gid, c->gid, c->gid) != 0 || setresuid(c->uid, c->uid, c->uid) != 0)
        return confine_report(c, CONFINE_FAILED, "failed", "cannot become uid %u: %s",
                              (unsigned)c->uid, strerror(errno));
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
        return confine_report(c, CONFINE_FAILED, "failed", "cannot give up privileges: %s",
                              strerror(errno));
    return 0;
}
