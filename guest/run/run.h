/* SPDX-License-Identifier: Apache-2.0 */
/* vhpc-run: represents, on the host, a program that runs in the job's guest. */
#ifndef VHPC_RUN_H
#define VHPC_RUN_H

#include "front.h"
#include "task.h"

struct link_server; /* link.h */
struct x11;         /* x11.h */

struct run_options {
    const char *socket;
    bool script;              /* argv[0] of the program is a file that is copied into the guest */
    const char *attach;       /* step whose program in the guest is taken over; NULL: none is */
    const char *save;         /* name of the image that the guest becomes afterwards; NULL: none */
    const char *save_command; /* path of vhpc on this host */
    int timeout_s;            /* longest wait for the guest's agent */
    char **argv;              /* of the program */
    int argc;
};

/*
 * Command line and VHPC_RUN_* environment. Returns -1 to continue, else the exit
 * status (--help, --version, usage).
 */
int run_parse(int argc, char **argv, struct run_options *o);

/*
 * If the program is vhpc-console: print a guest's console and return the exit status. Otherwise -1.
 */
int run_console(const struct run_options *o);

/* The program's values from this process: uid, groups, limits, script. 0 or -errno. */
int run_describe(const struct run_options *o, struct execspec *spec);

/*
 * The CPUs of the guest that correspond to those of the node on which slurmstepd has bound this
 * process; $VHPC_RUN_CPUS has the node's CPU of each CPU of the guest. All CPUs if the two have
 * nothing in common.
 */
void run_bind(struct execspec *spec);

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

/*
 * Make an image of the guest if the program has succeeded, by the command vhpc of this host.
 * Returns the exit status that takes the place of the program's, or -1: the program's stays.
 */
int run_save(const struct run_options *o, const struct front_result *r);

struct pmi;

/* Host calls: commands that the guest asks this job's user to run here. */
struct host_calls {
    struct host_call *list;
    struct front *front;
    const char *socket; /* of the guest */
    struct pmi *pmi;
    const struct x11 *x11; /* of the program */
    const char *allowed;   /* colon-separated base names */
    char *path;            /* colon-separated directories that are searched for them */
};

void host_calls_init(struct host_calls *h, struct front *f, const char *socket, struct pmi *pmi,
                     const struct x11 *x11);
/* Remove the files of calls that have not ended. */
void host_calls_end(struct host_calls *h);
/* For front.started: says what the guest does not offer, and tells a new PMI server the old state.
 */
void host_calls_started(struct front *f, const struct frame *frame);
int host_calls_frame(struct front *f, const struct frame *frame);
void host_calls_reap(struct front *f);
void host_calls_tick(struct front *f, long long now);

/*
 * Let front_run() end when the process that has started this one, slurmstepd, ends: no other
 * process would end the program then, and the other tasks of the step may wait for it.
 */
void run_watch_parent(struct front *f);

/* Report on stderr that a program was killed for memory, if the guest has reported it. */
void run_report_memory(const struct execspec *spec, const struct front_result *r);

/*
 * Discard output that a file has no room for: a script on the node continues, too, unless it looks
 * at the result of write(2). And report on stderr how much that was.
 */
bool run_drop(struct exchange *x, size_t len, int error);
void run_report_dropped(const struct execspec *spec);

/* Whether the guest ended, or does not answer, before the program has. */
bool run_is_lost(const struct front_result *r);

/*
 * Report that on stderr, and end the step if it has other tasks, unless SLURM_NO_KILL is set. The
 * signals of front_run() must still be blocked. Without a message if the guest was saved, and this
 * process was told to end. Returns the exit status.
 */
int run_end_lost(const struct run_options *o, const struct front_result *r,
                 const struct host_calls *calls);
/* End the step of a task that was ended because of what it has done: the others may wait for it. */
void run_end_refused(const struct run_options *o, const struct host_calls *calls);

#endif
