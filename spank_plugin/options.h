/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The --vhpc-* options, in a table that the build makes from vhpc_slurm.options.declared.
 *
 * The table yields the options that Slurm parses, the text of --help, the
 * environment defaults, the job-control variables and the manual page.  There is
 * a parser for each grammar of values.  This module does not know Slurm.
 */
#ifndef VHPC_SPANK_OPTIONS_H
#define VHPC_SPANK_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bounds.h"
#include "option_ids.h"

struct vhpc_option;

/*
 * Check text and write its canonical form.  On false, why describes a correct value if the option's
 * member expected does not suffice.
 */
typedef bool vhpc_option_parse(const struct vhpc_option *option, const char *text,
                               char value[VHPC_VALUE_SIZE], const char **why);

/* Words that a list may not have together: all of present, and none of absent; bits of their
 * indexes. */
struct vhpc_words_refused {
    unsigned present;
    unsigned absent;
    const char *why;
};

struct vhpc_option {
    const char *name;     /* after the two dashes */
    const char *arginfo;  /* shape of the value, for --help */
    const char *variable; /* environment default and job-control variable */
    const char *usage;    /* one line for --help */
    const char *detail;   /* paragraph for the manual page, in plain text */
    const char *expected; /* a correct value: "a whole number from 0 to 256 is expected" */
    vhpc_option_parse *parse;
    uint64_t least; /* of a number or a size; of a size in MiB */
    uint64_t most;  /* the same; of a path: its bytes */
    const char *const *words;
    const struct vhpc_words_refused *refused;
};

extern const struct vhpc_option vhpc_options[VHPC_OPTION_COUNT];

/* Values as given, in canonical form; an option that is not set has no value. */
struct vhpc_values {
    bool set[VHPC_OPTION_COUNT];
    bool from_file[VHPC_OPTION_COUNT]; /* of --vhpc-environment */
    char text[VHPC_OPTION_COUNT][VHPC_VALUE_SIZE];
};

/*
 * Set one option from what the user wrote.  origin says where it came from ("--vhpc-batch",
 * "VHPC_BATCH").  On false the values are unchanged and why has one line: what, why, what to do.
 */
bool vhpc_values_set(struct vhpc_values *values, enum vhpc_option_id id, const char *origin,
                     const char *text, char *why, size_t size);

#endif
