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
