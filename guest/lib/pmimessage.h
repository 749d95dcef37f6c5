/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages of PMI-1 and PMI-2 (slurmstepd's mpi/pmi2). PMI-1 has lines "cmd=NAME key=value ...".
 * PMI-2 begins with "init" and its answer, which are lines of PMI-1, and then has messages
 * "cmd=NAME;key=value;..." after their length in six characters.
 */
#ifndef VHPC_PMIMESSAGE_H
#define VHPC_PMIMESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PMI_LENGTH = 6 }; /* characters of the length of a message of PMI-2 */

struct pmi_message {
    const char *text; /* with the length of PMI-2 */
    size_t len;
    bool fields; /* PMI-2 */
};

/* The length in these six characters, or -1. */
long pmi_length(const void *six);
/*
 * Bytes of the first message in data, or 0 if it is not complete; -1: these are no messages, or it
 * is longer than `most`.
 */
long pmi_first(const void *data, size_t len, bool fields, size_t most);
/* Whether it is this command. */
bool pmi_is(const struct pmi_message *m, const char *name);
/* Whether it has this field: "key=value". */
bool pmi_has(const struct pmi_message *m, const char *field);
/* Whether this init, or the answer to one, is of PMI-2: messages with fields follow it. */
bool pmi_begins_2(const struct pmi_message *m);

#endif
