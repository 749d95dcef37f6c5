/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PMI of a task, on the host. Its server is in slurmstepd; the task's end of it is relayed into the
 * guest.
 */
#ifndef VHPC_RUN_PMI_H
#define VHPC_RUN_PMI_H

#include "pmi_pump.h"
#include "pmi_repeat.h"
#include "pmix.h"
#include "run.h"

/* The program's descriptor of PMI-1 and PMI-2 in the guest. */
enum { PMI_NUMBER = 3 };

struct pmi {
    int server;      /* our end of PMI-1 and PMI-2; -1: none */
    uint32_t tasks;  /* of the step */
    uint32_t guests; /* of the job on each node */
    struct pmi_pump pump;
    struct pmi_repeat repeat;
    struct link_server pmix;
};

/*
 * Decide what the program gets of PMI, and describe that in spec. A single task, or one whose user
 * has set VHPC_PMI=singleton, gets no PMI variables. 0, -errno, or an exit status above 0 with a
 * line on stderr.
 */
int pmi_prepare(struct pmi *p, const struct run_options *o, struct execspec *spec);
/* Connect what pmi_prepare() has described to the front. 0 or -errno. */
int pmi_connect(struct pmi *p, struct front *f);
/* With STARTED: tell the server what the program has told the one before a checkpoint. */
void pmi_tell(struct pmi *p, struct front *f, const struct frame *started);
/*
 * With STARTED: the first step of an MPI program whose tasks share an emulated guest says on stderr
 * that they wait long for each other.
 */
void pmi_say_emulated(const struct execspec *spec, const struct frame *started);
/* The next program of this process needs the descriptor as well. */
void pmi_keep(const struct pmi *p);
enum pmi_end {
    PMI_FINE,
    PMI_REFUSED,       /* as each task of the step that uses PMI */
    PMI_REFUSED_ALONE, /* for what this task has asked of PMI: the others may wait for it */
};
/*
 * Whether the program was ended because it used PMI. Prints the message, unless another task of the
 * step has.
 */
enum pmi_end pmi_refused(const struct execspec *spec, const struct front_result *r);

#endif
