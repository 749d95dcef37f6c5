/* SPDX-License-Identifier: Apache-2.0 */
/*
 * After a checkpoint the tasks of a step have another PMI server. It is told what the program has
 * told the one before; the answers are not passed on, because the program has had them.
 */
#ifndef VHPC_PMI_REPEAT_H
#define VHPC_PMI_REPEAT_H

#include "front.h"
#include "pmi_filter.h"

struct pmi_repeat {
    struct front *front;
    struct source server;
    struct buf requests, answer;
    size_t asked;              /* length of the request that has no answer yet, the first one */
    bool fields;               /* messages of PMI-2 follow */
    struct pmi_filter *filter; /* of the server's answers; NULL: they have none */
    bool *waits;               /* true: others must not read from the server */
};

/*
 * Begin with what STARTED says that the server has to be told. The front waits until all is
 * answered. 0 (also if there is nothing to tell) or -errno.
 *
 * r: zero, but for filter and waits. server: the task's end of PMI_FD.
 */
int pmi_repeat(struct pmi_repeat *r, struct front *f, int server, const struct frame *started);

#endif
