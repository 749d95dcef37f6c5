/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Answers of Slurm's PMI server (mpi/pmi2 in slurmstepd) to a task on a node with several guests:
 * the process mapping is replaced, everything else passes unchanged.
 *
 * PMI-1 has lines "cmd=get_result rc=0 value=...". PMI-2 begins with a line of PMI-1, the answer to
 * "init", and then has messages "cmd=...;rc=0;value=...;" after their length in six characters.
 */
#ifndef VHPC_PMI_FILTER_H
#define VHPC_PMI_FILTER_H

#include <stdbool.h>
#include <stdint.h>

#include "buf.h"
#include "pmimessage.h"

enum {
    PMI_MESSAGE_MAX = 64 << 10, /* bytes; a longer message passes unread, MPICH takes 1 KiB */
};

struct pmi_filter {
    uint32_t tasks;  /* of the step */
    uint32_t guests; /* of the job on each node */
    enum {
        PMI_LINES,
        PMI_MESSAGES,
        PMI_UNKNOWN /* neither: all passes */
    } mode;
    struct buf held; /* a message that is not complete */
    size_t pass;     /* bytes of a long message, or SIZE_MAX: up to the end of the line */
};

/* Take over bytes and append to out what can be passed on. 0 or -ENOMEM. */
int pmi_filter(struct pmi_filter *f, const uint8_t *data, size_t len, struct buf *out);
/* The stream is over: append to out what was held. 0 or -ENOMEM. */
int pmi_filter_end(struct pmi_filter *f, struct buf *out);

#endif
