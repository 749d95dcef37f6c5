/* SPDX-License-Identifier: Apache-2.0 */
/* sbcast in a guest: see lib/sbcast.h. */
#include "sbcast.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent.h"
#include "shared.h"

static bool target_is_shared(const struct sbcast *r)
{
    char folder[PATH_MAX];
    (void)snprintf(folder, sizeof folder, "%s", r->target);
    *strrchr(folder, '/') = '\0';
    return path_is_shared(folder[0] != '\0' ? folder : "/");
}

/* Number of the job's guests on this node. It is in the environment if there are several. */
static unsigned long guests_of_node(void)
{
    const char *text = getenv("VHPC_JOB_GUESTS");
    unsigned long number = text != NULL ? strtoul(text, NULL, 10) : 1;
    return number > 0 && number <= SBCAST_GUESTS_MAX ? number : 1;
}

char **sbcast_as_srun(int argc, char **argv)
{
    static struct sbcast r;
    struct stat st;
    const char *nodes = getenv("SLURM_JOB_NUM_NODES");
    if (getenv("SLURM_JOB_ID") == NULL || nodes == NULL || !sbcast_parse(argc, argv, &r) ||
        (target_is_shared(&r) && path_is_shared(r.source))) {
        /* Tells the host's vhpc-sbcast the result, so that it does not check again. */
        (void)setenv("VHPC_SBCAST", "host", 1);
        return NULL;
    }
    if (r.chooses || r.job != NULL)
        sbcast_fail(r.target,
                    "this folder is local to the guests: --jobid, --nodelist, --exclude and "
                    "--send-libs cannot be used");
    sbcast_open_source(&r, &st);
    unsigned long guests = guests_of_node();
    sbcast_forget("SLURM_");
    return sbcast_step(&r, &st, strtoul(nodes, NULL, 10), guests);
}
