/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vhpc-confine: run a helper with a user's ids, protected from the user's other processes.
 *
 * Daemons such as virtiofsd act for a user, so they run with the user's ids. But any process of the
 * user on the node could then trace them, take their descriptors (the guest's memory among them) or
 * hide in them after the end of the job.  This program prevents that between fork and exec; it does
 * no work of its own.
 */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <string.h>
#include <unistd.h>

#include "confine.h"

static int confine(const struct confine *c)
{
    int writer;
    int code = confine_resources(c);

    if (code != 0)
        return code;
    if (setgroups(c->group_count, c->groups) != 0)
        return confine_report(c, CONFINE_FAILED, "failed", "cannot set the groups: %s",
                              strerror(errno));
    writer = confine_start_writer();
    if (writer < 0)
        return confine_report(c, CONFINE_FAILED, "failed", "cannot fork: %s", strerror(errno));
    if (c->share != NULL)
        code = confine_enter_root(c);
    return code == 0 ? confine_become_user(c, writer) : code;
}

int main(int argc, char **argv)
{
    static struct confine c;
    bool done;
    int code = confine_parse(&c, argc, argv, &done);

    if (code != 0 || done)
        return code;
    if (c.report >= 0 && fcntl(c.report, F_SETFD, FD_CLOEXEC) != 0)
        c.report = -1;
    code = confine(&c);
    if (code != 0)
        return code;
    (void)confine_report(&c, 0, "ready", "%s", c.command[0]);
    (void)execv(c.command[0], c.command);
    return confine_report(&c, CONFINE_FAILED, "failed", "cannot execute %s: %s", c.command[0],
                          strerror(errno));
}
