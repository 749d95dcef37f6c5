/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sbcast for guests.  Slurm's own sbcast reads and writes files of the hosts, which is right for
 * folders that guests share with them.  It would also use the hosts' folders in place of folders
 * that are local to the guests, above all /tmp. For those, the file is the standard input of a step
 * that writes it in each guest of the job.  The agent does this in guests, vhpc-sbcast outside of
 * them.
 */
#ifndef VHPC_SBCAST_H
#define VHPC_SBCAST_H

#include <limits.h>
#include <stdbool.h>
#include <sys/stat.h>

enum { SBCAST_GUESTS_MAX = 64 }; /* of a job on a node */

struct sbcast {
    bool force, preserve;
    bool chooses;    /* other nodes than those of the job, or more than one file */
    const char *job; /* from --jobid; NULL = the job of this process */
    const char *source;
    char target[PATH_MAX]; /* the absolute name of the file to create */
};

/* Fill in zeroed *r; false if Slurm's own sbcast must report an error or print its help. */
bool sbcast_parse(int argc, char **argv, struct sbcast *r);
_Noreturn void sbcast_fail(const char *what, const char *why);
/*
 * Remove variables with this prefix, except SLURM_CONF and SLURM_JOB_ID: they describe the caller's
 * step and not the new one.
 */
void sbcast_forget(const char *prefix);
/*
 * Open the file as standard input, which srun passes to all its tasks; ends the process on failure.
 */
void sbcast_open_source(const struct sbcast *r, struct stat *st);
/* Arguments of srun, for this number of nodes of the job and of guests on each. */
char **sbcast_step(const struct sbcast *r, const struct stat *st, unsigned long nodes,
                   unsigned long guests);

#endif
