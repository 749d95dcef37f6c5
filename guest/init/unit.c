/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: The initrd adds the agent's unit to the guest */
#include "unit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fatal.h"
#include "newroot.h"

#define UNIT "/run/systemd/system/vhpc-agent.service"

static const char *const directories[] = {
    "/run/systemd",         "/run/systemd/system", "/run/systemd/system/multi-user.target.wants",
    "/run/systemd/network", "/run/NetworkManager", "/run/NetworkManager/conf.d",
};

static const struct {
    const char *path;
    const char *text;
} files[] = {
    /*
     * Delegate: sessions are cgroups below the unit's. FailureAction: a guest without an agent can
     * do nothing for its job, so it ends, as it does where the agent is PID 1. Limits: programs get
     * those that their job has.
     */
    {UNIT, "[Unit]\n"
           "Description=vhpc guest agent: runs the programs of a Slurm job\n"
           "FailureAction=poweroff-force\n"
           "\n"
           "[Service]\n"
           "ExecStart=" AGENT_TARGET "\n"
           "StandardOutput=journal+console\n"
           "StandardError=inherit\n"
           "Delegate=yes\n"
           "KillMode=mixed\n"
           "TimeoutStopSec=5\n"
           "OOMPolicy=continue\n"
           "TasksMax=infinity\n"
           "LimitCORE=infinity\n"
           "LimitMEMLOCK=infinity\n"
           "LimitNOFILE=1048576\n"
           "LimitNPROC=infinity\n"},
    {"/run/systemd/network/00-vhpc.network", "[Match]\nName=*\n\n[Link]\nUnmanaged=yes\n"},
    {"/run/NetworkManager/conf.d/vhpc.conf", "[keyfile]\nunmanaged-devices=*\n"},
};

static void path_in(char *out, size_t size, const char *new_root, const char *path)
{
    if (snprintf(out, size, "%s%s", new_root, path) >= (int)size)
        die(ENAMETOOLONG, "cannot use %s", path);
}

static void write_text(const char *path, const char *text)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    const size_t length = strlen(text);

    if (fd < 0 || write(fd, text, length) != (ssize_t)length || close(fd) != 0)
        die(errno, "cannot write %s", path);
}

static void link_to(const char *target, const char *new_root, const char *place)
{
    char path[512];

    path_in(path, sizeof path, new_root, place);
    if (symlink(target, path) != 0)
        die(errno, "cannot create the link %s", path);
}

void install_unit(const char *new_root)
{
    char path[512];

    for (size_t i = 0; i < sizeof directories / sizeof *directories; i++) {
        path_in(path, sizeof path, new_root, directories[i]);
        mkdir_or_die(path);
    }
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        path_in(path, sizeof path, new_root, files[i].path);
        write_text(path, files[i].text);
    }
    link_to(UNIT, new_root, "/run/systemd/system/multi-user.target.wants/vhpc-agent.service");
    /* /tmp is a folder of the writable layer, whose size has a limit, or which is on a disk. */
    link_to("/dev/null", new_root, "/run/systemd/system/tmp.mount");
}
