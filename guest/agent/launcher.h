/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MPI launchers that start a daemon in each guest by srun: mpirun of Open MPI (prted, up to version
 * 4 orted), and Hydra, which is mpirun of MPICH and others (hydra_pmi_proxy).
 *
 * Lost daemons: mpirun of Open MPI 5.0.7 returns 0, discards what srun writes, and prints that
 * Slurm is too old. On hosts Slurm ends the whole job then, so the 0 is never seen. In guests the
 * job continues: the srun of this guest tells the reason, and ends mpirun with an error.
 *
 * Guests without a network between them: mpirun of Open MPI 5.0.7 crashes, and Hydra never ends
 * for proxies that do not find it. The srun of this guest tells the reason instead, and ends them.
 */
#ifndef VHPC_LAUNCHER_H
#define VHPC_LAUNCHER_H

#include <stdbool.h>

#include "front.h"

enum launch_kind { LAUNCH_OTHER, LAUNCH_OPENMPI, LAUNCH_HYDRA };

/* The parts of a command line of srun that concern launchers. */
struct launch {
    enum launch_kind kind; /* of the daemons; LAUNCH_OTHER: it starts something else */
    bool shows_version;    /* instead */
    const char *nodes;     /* --nodes; "": not given */
    const char *nodelist;  /* --nodelist; "": not given */
};

struct launch launcher_read(int argc, char *const argv[]);
/* If mpirun discards our stderr, write to its own. */
void launcher_show_errors(void);
/* If daemons of Open MPI were lost: end mpirun before it notices that this process ends. */
void launcher_end(const struct front_result *r);

#endif
