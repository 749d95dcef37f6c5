/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The --vhpc-* options, described once.
 *
 * The table yields the options that Slurm parses, the text of --help, the
 * environment defaults, the job-control variables and the manual page.  This
 * module does not know Slurm.
 */
#ifndef VHPC_SPANK_OPTIONS_H
#define VHPC_SPANK_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

#include "bounds.h"

enum vhpc_option_id {
    VHPC_IMAGE,
    VHPC_MEM_RESERVE,
    VHPC_BATCH,
    VHPC_TIMEOUT,
    VHPC_CONSOLE,
    VHPC_VFS,
    VHPC_GUESTS_PER_NODE,
    VHPC_NETWORK,
    VHPC_DISK,
    VHPC_SAVE,
    VHPC_OPTION_COUNT,
};

/*
 * Check text and write its canonical form.  On false, why describes a correct value ("a number of
 * seconds from 1 to 3600").
 */
typedef bool vhpc_option_parse(const char *text, char value[VHPC_VALUE_SIZE], const char **why);

struct vhpc_option {
    const char *name;     /* after the two dashes */
    const char *arginfo;  /* shape of the value, for --help */
    const char *variable; /* environment default and job-control variable */
    const char *usage;    /* one line for --help */
    const char *detail;   /* paragraph for the manual page, in plain text */
    vhpc_option_parse *parse;
};

extern const struct vhpc_option vhpc_options[VHPC_OPTION_COUNT];

/* Values as given, in canonical form; an option that is not set has no value. */
struct vhpc_values {
    bool set[VHPC_OPTION_COUNT];
    char text[VHPC_OPTION_COUNT][VHPC_VALUE_SIZE];
};

/*
 * Set one option from what the user wrote.  origin says where it came from ("--vhpc-batch",
 * "VHPC_BATCH").  On false the values are unchanged and why has one line: what, why, what to do.
 */
bool vhpc_values_set(struct vhpc_values *values, enum vhpc_option_id id, const char *origin,
                     const char *text, char *why, size_t size);

#endif
