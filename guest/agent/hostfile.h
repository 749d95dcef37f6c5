/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files with the guests of the job and their CPUs, as mpirun reads them: one in the format of Open
 * MPI, one in that of MPICH and Intel MPI.
 */
#ifndef VHPC_HOSTFILE_H
#define VHPC_HOSTFILE_H

#include <stdbool.h>

#include "agent.h"
#include "buf.h"
#include "execspec.h"
#include "tlv.h"

enum {
    HOSTFILE_HOSTS_MAX = 65536,
    HOSTFILE_SLOTS_MAX = 65536,
    HOSTFILE_NAME_MAX = 253, /* RFC 1035 */
};

/* The content of both files, and the names; each without final NUL. */
struct hostfile {
    struct buf slots;    /* "n1 slots=4" */
    struct buf machines; /* "n1:4" */
    struct buf names;    /* "n1 n2" */
    size_t count;
};

/* Whether these bytes are the name of a host. */
bool hostfile_is_name(const uint8_t *name, size_t len);
/* A field of the request: u32 slots, then a host name. 0, -EPROTO or -ENOMEM. */
int hostfile_add(struct hostfile *h, const struct tlv *t);
/* Write both files. 0, or -errno with one line in text. */
int hostfile_write(struct hostfile *h, const char *slots_path, const char *machines_path,
                   char *text, size_t size);
/* The files of this guest; the agent keeps the names. 0, or -errno with one line in text. */
int hostfile_apply(struct agent *a, struct hostfile *h, char *text, size_t size);
/* Set VHPC_HOSTFILE and VHPC_MACHINEFILE for a program, if the files exist. 0 or -ENOMEM. */
int hostfile_environment(const struct agent *a, struct execspec *spec);
void hostfile_free(struct hostfile *h);

#endif
