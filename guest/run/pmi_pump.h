/* SPDX-License-Identifier: Apache-2.0 */
/* Passes what a PMI server says through a filter: from a socket of Slurm to one of the relay. */
#ifndef VHPC_PMI_PUMP_H
#define VHPC_PMI_PUMP_H

#include "loop.h"
#include "pmi_filter.h"

struct pmi_pump {
    struct loop *loop;
    struct source from; /* the server; it is not closed */
    struct source to;
    struct pmi_filter filter;
    struct buf out;
    bool over;  /* the server says no more */
    bool waits; /* another one reads from the server */
};

/*
 * Begin with a step of so many tasks, on nodes with so many guests. Returns the non-blocking end of
 * a socketpair on which the filtered stream arrives, or -errno. *p must not move.
 */
int pmi_pump_start(struct pmi_pump *p, struct loop *loop, int server, uint32_t tasks,
                   uint32_t guests);

#endif
