/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Variables that the user names in --export win over those of the image, but a guest cannot tell
 * them from the others in its environment.  So sbatch and srun list the names in a variable; Slurm
 * passes on all that begin with SLURM, whatever --export says.
 */
#ifndef VHPC_SPANK_EXPORTED_H
#define VHPC_SPANK_EXPORTED_H

#include <stdbool.h>

#define VHPC_ENV_EXPORTED "SLURM_VHPC_EXPORTED" /* as IMAGE_ENV_EXPORTED: NAME,NAME... */

/* What srun's command line says. */
struct vhpc_srun_words {
    const char *exported; /* of --export, NULL if it is not given */
    bool is_for_job;      /* --jobid: a step of an existing job */
};

struct vhpc_srun_words vhpc_srun_words(int argc, char *const *argv);

/*
 * Set the variable for a value of --export; without a value, or if it names none, remove it. False
 * if there is no memory.
 */
bool vhpc_exported_set(const char *value);

/*
 * Around the reading of sbatch's options: sbatch leaves their --export in SLURM_EXPORT_ENV, but not
 * if the submitting shell has this variable. The first call hides that of the shell, the second one
 * returns the value that sbatch has set, NULL if it is ALL or not given, and puts the shell's back.
 * The result lives until the next call.
 */
void vhpc_sbatch_hide_export(void);
const char *vhpc_sbatch_export(void);

#endif
