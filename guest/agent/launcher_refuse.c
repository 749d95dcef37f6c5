/* SPDX-License-Identifier: Apache-2.0 */
/* Launchers whose daemons would be in several guests that have no network between them. */
/* Decision: An srun that lets mpirun exit with 126 */
#include "launcher_refuse.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "launcher_process.h"

enum { EXIT_REFUSED = 126, HOST_NAME_SIZE = 256 }; /* as of a refused MPI program of srun */

#define SITE_INTERFACE "site0" /* as the node names it */

/* The agent sets these variables for each program if the job has such a network. */
static bool has_network(void)
{
    return getenv("VHPC_INTERFACE") != NULL || getenv("VHPC_FABRIC") != NULL ||
           if_nametoindex(SITE_INTERFACE) != 0;
}

/* Whether this guest has an address, such as that of a NAT, which does not lead to other guests. */
static bool has_address(void)
{
    struct ifaddrs *all = NULL;
    bool found = false;
    if (getifaddrs(&all) < 0)
        return true;
    for (const struct ifaddrs *i = all; i != NULL && !found; i = i->ifa_next)
        found = i->ifa_addr != NULL && (i->ifa_flags & IFF_LOOPBACK) == 0 &&
                (i->ifa_addr->sa_family == AF_INET || i->ifa_addr->sa_family == AF_INET6);
    freeifaddrs(all);
    return found;
}

/* Whether a list of nodes names this guest and nothing else. */
static bool is_this_guest(const char *nodelist)
{
    char name[HOST_NAME_SIZE];
    if (gethostname(name, sizeof name) < 0)
        return false;
    name[sizeof name - 1] = '\0';
    name[strcspn(name, ".")] = '\0';
    size_t len = strcspn(nodelist, ".");
    return strlen(name) == len && strncmp(name, nodelist, len) == 0;
}

/* Hydra starts a proxy by srun also for processes of its own guest. */
static bool leaves_this_guest(const struct launch *launch)
{
    return strtol(launch->nodes, NULL, 10) > 1 ||
           (launch->nodelist[0] != '\0' && !is_this_guest(launch->nodelist));
}

/*
 * mpirun of Open MPI 5 asks for srun's version, then reads the nodes of the job, and crashes at the
 * first one that is not this guest if the guest has no address (PRRTE 3.0.8,
 * prte_check_host_is_local). It reads other nodes if its parameter "ras" asks for it.
 */
static bool crashes_without_address(const char *name, pid_t launcher)
{
    const char *nodelist = getenv("SLURM_JOB_NODELIST");
    if (nodelist == NULL)
        nodelist = getenv("SLURM_NODELIST");
    return strncmp(name, "prte", 4) == 0 && !has_address() && nodelist != NULL &&
           !is_this_guest(nodelist) && getenv("PRTE_MCA_ras") == NULL &&
           !launcher_has_word(launcher, "ras");
}

void launcher_refuse(const struct launch *launch)
{
    char name[LAUNCHER_NAME_MAX] = "";
    if ((launch->kind == LAUNCH_OTHER && !launch->shows_version) || has_network())
        return;
    pid_t launcher = launcher_find(name);
    if (launch->shows_version && (launcher == 0 || !crashes_without_address(name, launcher)))
        return;
    if (launch->kind == LAUNCH_HYDRA && !leaves_this_guest(launch))
        return;
    int fd = launcher != 0 ? launcher_stderr(launcher) : -1;
    bool is_unknown = launcher == 0 || strncmp(name, "prte", 4) == 0;
    (void)dprintf(fd >= 0 ? fd : STDERR_FILENO,
                  "vhpc: %s starts an MPI program in several guests, but the guests of this job "
                  "have no network between them: submit the job with --vhpc-network=job\n",
                  is_unknown ? "mpirun" : name);
    if (launcher != 0)
        launcher_exit(launcher, EXIT_REFUSED);
    exit(EXIT_REFUSED);
}
