/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sbcast for guests.  Slurm's own reads and writes files of the hosts, which is
 * right for folders that guests share with them.  Folders of the guests' own,
 * /tmp above all, it would mistake for the hosts': there the file goes through
 * the standard input of a step that writes it in every guest of the job.  The
 * agent does so in guests, vhpc-sbcast outside of them.
 */
#ifndef VHPC_SBCAST_H
#define VHPC_SBCAST_H

#include <limits.h>
#include <stdbool.h>
#include <sys/stat.h>

enum { SBCAST_GUESTS_MAX = 64 }; /* of a job on a node */

struct sbcast {
    bool force, preserve;
    bool chooses;    /* other nodes, or more files, than the job and the one file */
    const char *job; /* of --jobid; NULL = this one */
    const char *source;
    char target[PATH_MAX]; /* the absolute name of the file to make */
};

/* Fill in zeroed *r; false when Slurm's own shall say what is wrong, or its help. */
bool sbcast_parse(int argc, char **argv, struct sbcast *r);
_Noreturn void sbcast_fail(const char *what, const char *why);
/*
 * Remove variables that begin so, but for SLURM_CONF and SLURM_JOB_ID: what the caller's
 * step was told says nothing about the one that is to come.
 */
void sbcast_forget(const char *prefix);
/* The file as standard input, for srun to give to all of its tasks; ends the process on failure. */
void sbcast_open_source(const struct sbcast *r, struct stat *st);
/* srun's arguments, for so many nodes of the job and guests on each. */
char **sbcast_step(const struct sbcast *r, const struct stat *st, unsigned long nodes,
                   unsigned long guests);

#endif
