/* SPDX-License-Identifier: Apache-2.0 */
/* vhpc-run: stands on the host for a program that runs in the job's guest. */
#ifndef VHPC_RUN_H
#define VHPC_RUN_H

#include "front.h"
#include "task.h"

struct run_options {
    const char *socket;
    bool script;   /* argv[0] of the program is a file to be carried into the guest */
    int timeout_s; /* longest wait for the guest's agent */
    char **argv;   /* of the program */
    int argc;
};

/*
 * Command line and VHPC_RUN_* environment. Returns -1 to go on, else the exit
 * status (--help, --version, usage).
 */
int run_parse(int argc, char **argv, struct run_options *o);

/* Everything of this process that the program shall have: uid, groups, limits, script. 0, -errno.
 */
int run_describe(const struct run_options *o, struct execspec *spec);

/*
 * What the guest is told about PMI, which is not relayed into it: that a program of
 * a step of several tasks may not use it; and that a single task, or one whose user
 * has set VHPC_PMI=singleton, has none. 0, -errno, or an exit status above 0, with a
 * line on stderr.
 */
int run_pmi(const struct run_options *o, struct execspec *spec);
/* Was this the end because of PMI? Says so, unless another task of the step in that guest has. */
bool run_pmi_refused(const struct execspec *spec, const struct front_result *r);

/*
 * Where the guest has no such program and the node has one that came during the job: copy
 * it there and start anew with argv; returns when there is nothing of the kind.
 */
void run_copy_and_retry(const struct run_options *o, const struct front_result *r, char **argv);

/*
 * A descriptor on which the numbers of signals to our whole process group are told, a
 * byte each; -1: none can be had. Before anything is opened that must not be inherited.
 */
int run_watch_group(void);
/* End who tells. */
void run_unwatch_group(void);

/* Host calls: commands that the guest asks this job's user to run here. */
struct host_calls {
    struct host_call *list;
    struct front *front;
    const char *allowed; /* colon-separated base names */
    char *path;          /* where they are looked for */
};

void host_calls_init(struct host_calls *h, struct front *f);
int host_calls_frame(struct front *f, const struct frame *frame);
void host_calls_reap(struct front *f);
void host_calls_tick(struct front *f, long long now);

#endif
