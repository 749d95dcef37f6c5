/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Command lines of sbatch, salloc and srun: where the script or the command begins, and which
 * values options have. Which options take a value is the same in Slurm 22.05 to 26.05.
 */
#ifndef VHPC_SLURM_ARGS_H
#define VHPC_SLURM_ARGS_H

#include <stdbool.h>
#include <stddef.h>

enum slurm_program { SLURM_SBATCH, SLURM_SALLOC, SLURM_SRUN };

/* An option with its long name; value is "" if it has no value. Not called for unknown options. */
typedef void slurm_option_seen(void *arg, const char *name, const char *value);
/*
 * Whether a word after an option that Slurm does not have (another SPANK plugin's) is the script or
 * the command. If not, it is taken for the value of the option.
 */
typedef bool slurm_word_is_operand(void *arg, const char *word);

struct slurm_reader {
    slurm_option_seen *option;
    slurm_word_is_operand *operand;
    void *arg;
};

/* Returns the index of the script or the command; argc without a script or command. */
int slurm_args_read(enum slurm_program program, int argc, char *const argv[],
                    const struct slurm_reader *reader);

/* A variable that --export names, as NAME or as NAME=VALUE; name need not end after len. */
typedef void slurm_name_seen(void *arg, const char *name, size_t len, bool has_value);

/* Reads a value of --export; ALL, NONE and NIL are no names. */
void slurm_export_read(const char *value, slurm_name_seen *named, void *arg);

/* Whether a list that ends with NULL has the name. */
bool slurm_name_is_one_of(const char *name, const char *const *list);

#endif
