/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state file of a job on a node: written by the node hooks as root,
 * <run_dir>/jobs/<job id>/state, read here as the user when a task starts.
 */
#ifndef VHPC_SPANK_STATE_H
#define VHPC_SPANK_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define VHPC_STATE_MAX 131072    /* bytes of a file */
#define VHPC_STATE_LINE_MAX 4096 /* bytes of a line without its newline */

enum vhpc_status { VHPC_BOOTING, VHPC_READY, VHPC_FAILED };

struct vhpc_state {
    char *bytes; /* owns what the strings below point into */
    uint32_t job;
    uint32_t restart;
    enum vhpc_status status;
    bool batch_on_host;
    const char *generation;   /* JOB.RESTART.NONCE */
    const char *image;        /* [own/]NAME:TAG[@DIGEST] */
    const char *message;      /* of a failed job; never NULL then */
    const char *socket;       /* absolute path of the first guest's socket; never NULL when ready */
    const char *commands;     /* colon separated host commands; "" when none */
    const char *command_path; /* directory of Slurm's commands; "" when none is named */
    uint32_t guests;          /* on this node; their sockets differ in the folder: g0, g1, ... */
    uint32_t components;      /* of a het job, if they have one network for MPI; else 0 */
    const char *attach;       /* step whose program in the guest is taken over: batch; "" if none */
    const char *warning;      /* message for the user when the job starts; "" if there is none */
    const char *gpus;         /* the node's numbers of GPUs: "5:2,7", a comma between guests */
    const char *cpus;         /* the node's CPU of each vCPU, in the same form; "" if unknown */
};

enum vhpc_state_found {
    VHPC_STATE_ABSENT, /* no guests of this job on this node */
    VHPC_STATE_BAD,    /* the file exists but is not valid; why has the reason */
    VHPC_STATE_OK,
};

/*
 * Parse the contents of a state file.  Unknown keys are ignored; a known key that is missing,
 * repeated or malformed makes the whole file invalid. On true, vhpc_state_free() frees what state
 * has.
 */
bool vhpc_state_parse(struct vhpc_state *state, const char *bytes, size_t length, char *why,
                      size_t size);

/*
 * Read the state of a job below run_dir.  Bounded; does not follow a link in the last component;
 * the file must belong to owner (root in production), and no other user may be able to write it.
 */
enum vhpc_state_found vhpc_state_read(struct vhpc_state *state, const char *run_dir, uint32_t job,
                                      uid_t owner, char *why, size_t size);

/*
 * Which guest runs the task with this local id, of this number of tasks on the node: tasks fill
 * guests in blocks, in their order.
 */
uint32_t vhpc_state_guest_of(const struct vhpc_state *state, uint32_t local_id, uint32_t tasks);

/* Path of a guest's socket; false if it does not fit. */
bool vhpc_state_socket(const struct vhpc_state *state, uint32_t guest, char *path, size_t size);

/* A guest's part of gpus, and of cpus; false if it does not fit. */
bool vhpc_state_gpus(const struct vhpc_state *state, uint32_t guest, char *gpus, size_t size);
bool vhpc_state_cpus(const struct vhpc_state *state, uint32_t guest, char *cpus, size_t size);

void vhpc_state_free(struct vhpc_state *state);

#endif
