/* SPDX-License-Identifier: Apache-2.0 */
/* vhpc-run: represents, on the host, a program that runs in the job's guest. */
#ifndef VHPC_RUN_H
#define VHPC_RUN_H

#include "front.h"
#include "task.h"

struct run_options {
    const char *socket;
    bool script;   /* argv[0] of the program is a file that is copied into the guest */
    int timeout_s; /* longest wait for the guest's agent */
    char **argv;   /* of the program */
    int argc;
};

/*
 * Command line and VHPC_RUN_* environment. Returns -1 to go on, else the exit
 * status (--help, --version, usage).
 */
int run_parse(int argc, char **argv, struct run_options *o);

/* What the program takes over from this process: uid, groups, limits, script. 0 or -errno. */
int run_describe(const struct run_options *o, struct execspec *spec);

/*
 * Tells the guest about PMI, which is not relayed: a program of a step with several tasks may not
 * use it. A single task, or one whose user has set VHPC_PMI=singleton, gets no PMI variables. 0,
 * -errno, or an exit status above 0 with a line on stderr.
 */
int run_pmi(const struct run_options *o, struct execspec *spec);
/*
 * Whether the program was ended because it used PMI. Prints the message, unless another task of the
 * step has.
 */
bool run_pmi_refused(const struct execspec *spec, const struct front_result *r);

/*
 * If the guest has no such program and the node has one that came during the job: copy it to the
 * guest and start again with argv. Returns if there is no such program.
 */
void run_copy_and_retry(const struct run_options *o, const struct front_result *r, char **argv);

/*
 * A descriptor from which the numbers of signals to our whole process group can be read, one byte
 * each; -1 if that is not possible. To be called before anything is opened that must not be
 * inherited.
 */
int run_watch_group(void);
/* End the process that reports them. */
void run_unwatch_group(void);

/* Host calls: commands that the guest asks this job's user to run here. */
struct host_calls {
    struct host_call *list;
    struct front *front;
    const char *allowed; /* colon-separated base names */
    char *path;          /* colon-separated directories that are searched for them */
};

void host_calls_init(struct host_calls *h, struct front *f);
int host_calls_frame(struct front *f, const struct frame *frame);
void host_calls_reap(struct front *f);
void host_calls_tick(struct front *f, long long now);

#endif
